"""Waits and looks: a generator of the worker yields one instead of blocking, or asking, the thread that steps it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from outbox.runtime.stop import Stop
from outbox.worker.calls import Call

#: A wait that lasts longer than this is long: what was handled before is settled meanwhile.
SOON_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is to be done before the moment `until`, by `time.monotonic`.

    The wait is over earlier when one of `calls` has come back, or when `stop` is asked; both wake the stepping thread.
    """

    until: float
    calls: tuple[Call, ...] = ()
    stop: Stop | None = None

    @property
    def over(self) -> bool:
        """True when there is work to do again."""
        return (
            any(call.finished for call in self.calls)
            or (self.stop is not None and self.stop.asked)
            or time.monotonic() >= self.until
        )

    def at_most(self, seconds: float) -> Wait:
        """Return a wait that is not longer than so many seconds."""
        return replace(self, until=min(self.until, time.monotonic() + seconds))


@dataclass(slots=True)
class Look:
    """Asks the stepping partition to set `others`: whether other messages could be tried.

    They could show whether the destination is away, or a message crashes its handler.
    """

    others: bool = False
