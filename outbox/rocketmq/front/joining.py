"""Calls that are answered together: those that come while a call of the database runs wait for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

from outbox.rocketmq.front.calls import MOST_WAITING, Threads
from outbox.rocketmq.front.statuses import Code, RefusedError

T = TypeVar("T")
R = TypeVar("R")

#: The most items that go together, if each has the size 1.
_MOST = 1000


class Joining(Generic[T, R]):
    """Runs a function for many calls at once; in one event loop only."""

    def __init__(
        self,
        threads: Threads,
        run: Callable[[Sequence[T]], Sequence[R | Exception]],
        *,
        at_once: int = 1,
        size: Callable[[T], int] = lambda _item: 1,
        most: int = _MOST,
    ) -> None:
        """`run`: returns for each item, in order, its result, or the error of its call alone.

        `at_once`: so many runs. `most`: of the sizes of the items of a run; one item may have more.
        """
        self._threads, self._run, self._at_once = threads, run, at_once
        self._size, self._most = size, most
        self._waiting: dict[asyncio.Future[R], T] = {}
        #: The calls with items that wait.
        self._calls = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """True while a call runs or waits."""
        return bool(self._tasks)

    async def call(self, items: Sequence[T]) -> list[R]:
        """Return the results for items, in order.

        Raises:
            RefusedError: too many calls wait.
        """
        if not items:
            return []
        if self._calls >= MOST_WAITING:
            raise RefusedError(Code.TOO_MANY_REQUESTS, "too many calls wait for the database")
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[R]] = [loop.create_future() for _ in items]
        self._waiting.update(zip(futures, items, strict=True))
        if len(self._tasks) < self._at_once:
            self._tasks.add(asyncio.create_task(self._answer()))
        self._calls += 1
        try:
            return await asyncio.gather(*futures)
        finally:
            self._calls -= 1
            # Items of a call that its client has given up are large, perhaps.
            for future in futures:
                self._waiting.pop(future, None)

    async def _answer(self) -> None:
        try:
            while some := self._taken():
                await self._answer_some(some)
        finally:
            # Here, not in a callback: the next item would wait for a task that takes no more.
            task = asyncio.current_task()
            assert task is not None, "a task runs this"
            self._tasks.discard(task)

    async def _answer_some(self, some: Mapping[asyncio.Future[R], T]) -> None:
        try:
            results = await self._threads.run(partial(self._run, [*some.values()]))
        except Exception as error:
            results = [error] * len(some)
        for future, result in zip(some, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _taken(self) -> dict[asyncio.Future[R], T]:
        """Return the items that go next, which wait no more."""
        some, size = dict[asyncio.Future[R], T](), 0
        for future, item in self._waiting.items():
            size += self._size(item)
            if some and size > self._most:
                break
            some[future] = item
        for future in some:
            del self._waiting[future]
        return some
