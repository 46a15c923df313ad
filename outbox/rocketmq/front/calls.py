"""Calls of clients, free of gRPC: a handler takes the caller and the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from outbox.rocketmq.front.protocol import Wire
from outbox.rocketmq.front.statuses import Code, RefusedError

R = TypeVar("R")

#: Threads for calls of the database, and the most calls that wait for one.
THREADS, MOST_WAITING = 16, 1000


@dataclass(frozen=True, slots=True)
class Call:
    """A caller: the id of the client, and the call's metadata with names in lower case.

    `seconds`: until the client gives the call up; None: it waits for ever. `tls`: whether the call came by TLS.
    """

    client: str
    metadata: Mapping[str, str]
    seconds: float | None = None
    tls: bool = False


#: A handler of a call with one response, or with several. Either may raise a `RefusedError`.
Unary = Callable[[Call, Wire], Awaitable[Wire]]
Streaming = Callable[[Call, Wire], AsyncIterator[Wire]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """Handlers by the name of the call; a call without a handler is unimplemented.

    `beside`: runs beside the calls, until it is cancelled. `end`: answers calls that wait, when the front stops.
    """

    unary: Mapping[str, Unary]
    streaming: Mapping[str, Streaming]
    beside: Callable[[], Coroutine[Any, Any, None]]
    end: Callable[[], None]


class Threads:
    """Runs functions that wait for the database, and refuses more than may wait."""

    def __init__(self, threads: int = THREADS, most_waiting: int = MOST_WAITING) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="outbox-front")
        self._most = threads + most_waiting
        self._under_way = 0

    async def run(self, function: Callable[[], R]) -> R:
        """Run a function in a thread and return its result. Called in one event loop only.

        Raises:
            RefusedError: too many functions wait.
        """
        if self._under_way >= self._most:
            raise RefusedError(Code.TOO_MANY_REQUESTS, "too many calls wait for the database")
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        finally:
            self._under_way -= 1

    def close(self) -> None:
        """End the threads, after the functions under way."""
        self._pool.shutdown()
