"""Calls of clients, free of gRPC: a handler takes the caller and the request."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from outbox.rocketmq.front.protocol import Wire
from outbox.rocketmq.front.statuses import Code, RefusedError, line_of
from outbox.runtime.throttled_log import ThrottledLog

logger = logging.getLogger("outbox")

R = TypeVar("R")

#: Threads for calls of the database, and the most calls that wait for one.
THREADS, MOST_WAITING = 16, 1000


@dataclass(frozen=True, slots=True)
class Call:
    """A caller: the id of the client, and the call's metadata with names in lower case.

    `seconds`: until the client gives the call up; None: it waits for ever. `tls`: whether the call came by TLS.
    `connection`: the other end of it, in gRPC's words.
    """

    client: str
    metadata: Mapping[str, str]
    seconds: float | None = None
    tls: bool = False
    connection: str = ""


#: Sends a response of a call with several; raises when the client is gone.
Send = Callable[[Wire], Awaitable[None]]
#: A handler of a call with one response, or with several. Either may raise a `RefusedError`, and is cancelled when the
#: client gives the call up.
Unary = Callable[[Call, Wire], Awaitable[Wire]]
Streaming = Callable[[Call, Wire, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """Handlers by the name of the call; a call without a handler is unimplemented.

    `beside`: runs beside the calls, until it is cancelled. `end`: answers calls that wait, when the front stops.
    """

    unary: Mapping[str, Unary]
    streaming: Mapping[str, Streaming]
    beside: Callable[[], Coroutine[Any, Any, None]]
    end: Callable[[], None]


async def regularly(seconds: float, do: Callable[[], Awaitable[object]], failure: str) -> None:
    """Do something after every so many seconds, until cancelled. `failure`: what the log says after an error."""
    log = ThrottledLog(logger)
    while True:
        await asyncio.sleep(seconds)
        try:
            await do()
        except Exception as error:
            log.warning("front: %s, trying again: %s", failure, line_of(error))


class Threads:
    """Runs functions that wait for the database in threads, and refuses more than may wait.

    A call that is cancelled counts until its thread is free. A process that ends does not wait for the threads.
    """

    def __init__(self, threads: int = THREADS, most_waiting: int = MOST_WAITING) -> None:
        self._most_threads, self._most = threads, threads + most_waiting
        self._jobs = deque[Callable[[], None]]()
        self._threads = 0
        #: Jobs that wait or run.
        self._under_way = 0
        self._closed = False
        self._lock = threading.Lock()
        self._more, self._none = threading.Condition(self._lock), threading.Condition(self._lock)

    async def run(self, function: Callable[[], R], unwanted: Callable[[R], object] | None = None) -> R:
        """Run a function in a thread and return its result.

        `unwanted`: run in a thread with the result of a call that was cancelled meanwhile.

        Raises:
            RefusedError: too many functions wait.
        """
        if self._under_way >= self._most:
            raise RefusedError(Code.TOO_MANY_REQUESTS, "too many calls wait for the database")
        future = self._begin(function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if unwanted is not None:
                future.add_done_callback(partial(self._left, unwanted))
            raise

    def soon(self, function: Callable[[], object]) -> None:
        """Run a function in a thread, however many wait; nobody waits for this one."""
        self._begin(function)

    def close(self, seconds: float | None = None) -> None:
        """End the threads after what is under way; after so many seconds leave behind what hangs."""
        with self._lock:
            if not self._none.wait_for(lambda: not self._under_way, seconds):
                logger.warning("front: %d calls of the database have not ended, and are left behind", self._under_way)
            self._closed = True
            self._more.notify_all()

    def _begin(self, function: Callable[[], R]) -> Future[R]:
        future: Future[R] = Future()
        with self._lock:
            if self._threads < min(self._under_way + 1, self._most_threads):
                # Nothing is counted if the machine has no thread left.
                threading.Thread(target=self._work, name="outbox-front", daemon=True).start()
                self._threads += 1
            else:
                self._more.notify()
            self._under_way += 1
            self._jobs.append(partial(_perform, future, function))
        return future

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # the result may be large
            with self._lock:
                self._under_way -= 1
                self._none.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._more.wait_for(lambda: self._jobs or self._closed)
            if self._jobs:
                return self._jobs.popleft()
            self._threads -= 1
            return None

    def _left(self, unwanted: Callable[[R], object], future: Future[R]) -> None:
        """Run `unwanted`; called by the thread, or by the event loop if the thread was faster."""
        if not future.cancelled() and future.exception() is None:
            self.soon(partial(unwanted, future.result()))


def _perform(future: Future[R], function: Callable[[], R]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:
            # An event loop takes no StopIteration, and others would end a task, or the front, without an answer.
            future.set_exception(RuntimeError(f"{type(error).__name__} in a thread of the front"))
    else:
        future.set_result(result)
