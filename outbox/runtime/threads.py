"""Blocking work in daemon threads, awaited in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

R = TypeVar("R")


class Threads:
    """Runs blocking work beside an event loop, in a daemon thread for each call. A process that ends does not wait.

    Work cannot be cancelled: a caller that is cancelled leaves its thread behind, which counts until the work ends.
    """

    def __init__(self, name: str, *, most: int) -> None:
        """`name`: of each thread. `most`: the most threads at once; further calls wait."""
        self._name = name
        self._room = asyncio.Semaphore(most)

    async def run(self, work: Callable[[], R]) -> R:
        """Return the result of `work`, or raise its exception."""
        loop = asyncio.get_running_loop()
        await self._room.acquire()
        answer: asyncio.Future[R] = loop.create_future()

        def tell(settle: Callable[[], None]) -> None:
            thread.join()  # this was its last step
            self._room.release()
            if not answer.done():
                settle()

        def perform() -> None:
            try:
                settle = partial(answer.set_result, work())
            except BaseException as error:
                settle = partial(answer.set_exception, error)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(tell, settle)

        thread = threading.Thread(target=perform, name=self._name, daemon=True)
        thread.start()
        return await answer
