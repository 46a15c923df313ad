"""Waits, looks and refills: a generator yields one instead of blocking, or asking, the thread that steps it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from outbox.model.message import Message
from outbox.runtime.stop import Stop
from outbox.worker.calls import Call
from outbox.worker.outcome import Outcome

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


@dataclass(slots=True)
class Refill:
    """Asks the stepping partition for further messages of the log, while calls for the batch are under way.

    `part`: the outcomes since the last part. `left`: the messages without an outcome, in the order of the log.
    `messages`: the answer, behind all others.
    """

    part: Outcome
    left: list[Message]
    messages: list[Message] = field(default_factory=list)
