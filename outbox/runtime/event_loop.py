"""An event loop in a thread of its own, for drivers that speak only asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import finalize

from outbox.runtime.fork import in_child

T = TypeVar("T")
R = TypeVar("R")

#: Seconds that `close` may take, before the loop is stopped all the same.
_PATIENCE = 1.0
#: A call is waited for so many times, each for its part of the time.
_WAITS = 10


class BackgroundLoop(Generic[T]):
    """Keeps an object in the event loop of a daemon thread; object and thread are made at the first call.

    `make` makes the object; `close` runs before the loop ends, at the latest when the BackgroundLoop is collected.
    A process that ends does not wait. In a forked child the first call makes another thread and another object.
    """

    def __init__(
        self,
        name: str,
        *,
        make: Callable[[], T],
        close: Callable[[T], Coroutine[Any, Any, None]],
        sees_end: bool = False,
    ) -> None:
        """`sees_end`: wait up to two more seconds for the tasks of an action that takes too long."""
        self._name = name
        self._sees_end = sees_end
        self._make = make
        self._close = close
        self._lock = threading.Lock()
        self._running: _Running | None = None
        in_child(self._after_fork)

    @property
    def is_running(self) -> bool:
        """Whether there is an object, in the loop."""
        return self._running is not None

    def run(self, action: Callable[[T], Coroutine[Any, Any, R]], *, timeout: float | None) -> R:
        """Run `action(object)` in the loop, and return its result; after a TimeoutError the next call begins anew.

        `timeout`: None: without a limit, and a TimeoutError of the action ends nothing else.
        """
        with self._lock:
            if self._running is None:
                self._running = self._start(self._make())
            running = self._running
        future = asyncio.run_coroutine_threadsafe(action(running.kept), running.loop)
        if timeout is None:
            return future.result()
        try:
            # A pause of the whole process ends only the wait that it falls into. The waits that follow give the loop
            # time to notice that the action's own deadline has passed.
            for _ in range(_WAITS - 1):
                with suppress(TimeoutError):
                    return future.result(timeout / _WAITS)
            return future.result(timeout / _WAITS)
        except TimeoutError:
            future.cancel()
            with self._lock:
                if self._running is running:
                    self._running = None
            running.dismiss()
            if self._sees_end:
                running.thread.join(2 * _PATIENCE)
            raise

    def stop(self) -> None:
        """Close the object and end the thread; do nothing when there is no thread."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.dismiss()
            running.thread.join(2 * _PATIENCE)

    def _start(self, kept: T) -> _Running:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop, kept), name=self._name, daemon=True)
        thread.start()
        dismiss = finalize(self, _dismiss, loop, self._close, kept)
        dismiss.atexit = False
        return _Running(loop, thread, kept, dismiss)

    def _after_fork(self) -> None:
        # The parent's loop must neither run nor be torn down here: its sockets and its epoll are the parent's, too.
        if self._running is not None:
            self._running.dismiss.detach()
            _left_behind.append(self._running)
        self._running = None
        self._lock = threading.Lock()


class _Running(NamedTuple):
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    kept: Any
    #: Ends all of it; a second call does nothing.
    dismiss: finalize[..., Any]


def _run(loop: asyncio.AbstractEventLoop, _kept: object) -> None:
    # This frame keeps the object as long as its thread. When a process ends, threads are not taken apart, so that no
    # connection is collected then, and none complains that nobody has closed it.
    asyncio.set_event_loop(loop)
    try:
        while True:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                continue  # raised by a task, which has it as well; it must not end all others
            break
    finally:
        loop.close()


def _dismiss(loop: asyncio.AbstractEventLoop, close: Callable[[T], Coroutine[Any, Any, None]], kept: T) -> None:
    asyncio.run_coroutine_threadsafe(_end(close(kept)), loop)


async def _end(close: Coroutine[Any, Any, None]) -> None:
    """End the running loop, after `close` and after the cancelling of every other task."""
    try:
        with suppress(TimeoutError):  # on a busy machine, or when the other side does not say good-bye
            async with asyncio.timeout(_PATIENCE):
                await close
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_PATIENCE)
        # A task that has just ended tells its caller in the loop's next round.
        await asyncio.sleep(0)
        asyncio.get_running_loop().stop()


_left_behind: list[object] = []
