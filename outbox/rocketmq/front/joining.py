"""Calls that are answered together: those that come while a call of the database runs wait for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from outbox.rocketmq.front.calls import Threads

T = TypeVar("T")
R = TypeVar("R")

#: At most so many items go into one statement.
_MOST = 1000


class Joining(Generic[T, R]):
    """Runs a function for many calls at once; in one event loop only."""

    def __init__(self, threads: Threads, run: Callable[[Sequence[T]], Sequence[R]]) -> None:
        """`run`: returns one result for each item, in order."""
        self._threads = threads
        self._run = run
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """True while a call runs or waits."""
        return self._task is not None

    async def call(self, items: Sequence[T]) -> list[R]:
        """Return the results for items, in order."""
        if not items:
            return []
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[R]] = [loop.create_future() for _ in items]
        self._waiting += zip(items, futures, strict=True)
        if self._task is None:
            self._task = asyncio.create_task(self._answer())
        return await asyncio.gather(*futures)

    async def _answer(self) -> None:
        try:
            while self._waiting:
                some, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                futures = [future for _, future in some]
                try:
                    results = await self._threads.run(partial(self._run, [item for item, _ in some]))
                except Exception as error:
                    for future in futures:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for future, result in zip(futures, results, strict=True):
                    if not future.done():
                        future.set_result(result)
        finally:
            self._task = None
