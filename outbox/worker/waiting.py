"""Waits: what a generator of the worker yields instead of blocking the thread that steps it."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from outbox.runtime.stop import Stop
from outbox.runtime.wakeup import Wake
from outbox.worker.calls import Call

#: A wait that lasts longer than this is long: what was handled before is settled meanwhile.
SOON_SECONDS = 0.005
_LONGEST_SECONDS = 3600.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do before the moment `until`, by `time.monotonic`.

    It is over earlier when `call` has come back, or when `stop` is asked; what ends it early sets the wake of the one
    who waits.
    """

    until: float
    call: Call | None = None
    stop: Stop | None = None

    @property
    def over(self) -> bool:
        """True when there is something to do again."""
        return (
            (self.call is not None and self.call.finished)
            or (self.stop is not None and self.stop.asked)
            or time.monotonic() >= self.until
        )

    @property
    def seconds(self) -> float:
        """For how long to sleep before another look: until the moment `until`, but no longer than can be slept."""
        return min(max(0.0, self.until - time.monotonic()), _LONGEST_SECONDS)

    def at_most(self, seconds: float) -> Wait:
        """Return this wait, or a shorter one that ends after so many seconds."""
        return replace(self, until=min(self.until, time.monotonic() + seconds))


def drive(steps: Generator[Wait, None, T], wake: Wake) -> T:
    """Run `steps` to their end, asleep during their waits; return what they return."""
    with closing(steps):
        while True:
            try:
                wait = next(steps)
            except StopIteration as end:
                return cast("T", end.value)
            while not wait.over:
                wake.wait(wait.seconds)
