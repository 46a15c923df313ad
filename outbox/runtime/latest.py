"""The newest answer to a question that costs time: asked seldom, in a thread that can be left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: At most this share of a processor is used for one question; and it is asked once a second at most.
_SHARE = 0.005
_LEAST_SECONDS = 1.0


class Latest(Generic[T]):
    """Asks a question when somebody wants the answer and the last one is old; all who ask meanwhile wait together."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._changed = threading.Condition()
        self._asking = False
        self._again_at = 0.0
        self._answer: T | Exception = TimeoutError("no answer yet")

    def begin(self) -> None:
        """Ask in a thread, unless the question is being asked, or was a moment ago."""
        with self._changed:
            if not self._asking and time.monotonic() >= self._again_at:
                threading.Thread(target=self._run, name="outbox-latest", daemon=True).start()
                # Last, because a thread may not start for want of memory.
                self._asking = True

    def get(self, until: float) -> T:
        """Return the newest answer; wait for a new one until a moment by `time.monotonic`.

        Raises:
            TimeoutError: the question is not answered in time.
            Exception: the question has failed.
        """
        self.begin()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._asking, max(0.0, until - time.monotonic())):
                raise TimeoutError("no answer in time")
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer

    def _run(self) -> None:
        began = time.thread_time()
        try:
            answer: T | Exception = self._ask()
        except Exception as error:
            answer = error
        used = time.thread_time() - began
        with self._changed:
            self._answer, self._asking = answer, False
            self._again_at = time.monotonic() + max(_LEAST_SECONDS, used / _SHARE)
            self._changed.notify_all()
