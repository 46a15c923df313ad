"""A fair lock: several workers that call one handler do so one at a time, first come, first served."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from outbox.runtime.fork import in_child


class FairLock:
    """A lock that goes to those who wait in the order in which they came.

    An ordinary lock would be taken again by the thread that released it, while others wait. After `longest` seconds the
    next one takes the lock although it was not released, because a call that hangs must not stop the others.
    """

    def __init__(self, longest: float = math.inf) -> None:
        self._longest = longest
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin free; also in a fork, which copies the holder and the queue, but no thread that would release it."""
        self._lock = threading.Lock()
        self._holder: object | None = None
        self._since = 0.0
        self._waiting: deque[tuple[object, threading.Event]] = deque()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait until it is our turn; at the end, give the lock to the next one."""
        me = object()
        self._wait(me)
        try:
            yield
        finally:
            self._pass_on(me)

    def _wait(self, me: object) -> None:
        with self._lock:
            if self._holder is None:
                self._take(me)
                return
            mine = threading.Event()
            self._waiting.append((me, mine))
        try:
            while not mine.wait(self._patience()):
                with self._lock:
                    if not mine.is_set() and self._waiting[0][0] is me and self._overdue():
                        self._waiting.popleft()
                        self._take(me)
                        return
        except BaseException:
            # Interrupted: leave the queue, so that nobody waits for us.
            with self._lock:
                self._waiting = deque(each for each in self._waiting if each[0] is not me)
            self._pass_on(me)
            raise

    def _patience(self) -> float | None:
        if math.isinf(self._longest):
            return None
        return max(0.01, self._since + self._longest - time.monotonic())

    def _overdue(self) -> bool:
        return time.monotonic() - self._since >= self._longest

    def _take(self, me: object) -> None:
        self._holder, self._since = me, time.monotonic()

    def _pass_on(self, me: object) -> None:
        with self._lock:
            if self._holder is not me:
                return
            self._holder = None
            if self._waiting:
                following, event = self._waiting.popleft()
                self._take(following)
                event.set()
