"""The settings of a worker: pace and portions."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, cast

from outbox.model.limits import require_wait, require_window
from outbox.store.log.log import Limits

#: Until when a worker works: until it is stopped; until all is handled that was committed before now, and nothing that
#: is parked is due; or until each partition has handled one batch, if there is one.
Until = Literal["stopped", "empty", "once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The pace and the limits of a worker; the defaults are those of `outbox relay`.

    Args:
        limits: of one read.
        poll: the shortest and the longest pause between two looks at an idle log, where no hint comes.
        lease: for how long a worker that died holds back the others.
        renew_every: how often a lease is renewed; at least twice within its length.
        settle_within: messages in quick succession are settled together, at most so long after the first call of the
            handler. A crash repeats them, and never more than one batch.

    Raises:
        ValueError: `renew_every` leaves no second try within a lease, or a length of time is outside its limits.
        TypeError: `limits` or `poll` is something else.
    """

    limits: Limits = field(default_factory=Limits)
    poll: tuple[timedelta, timedelta] = (timedelta(milliseconds=50), timedelta(seconds=1))
    lease: timedelta = timedelta(seconds=10)
    renew_every: timedelta = timedelta(seconds=3)
    settle_within: timedelta = timedelta(milliseconds=200)

    def __post_init__(self) -> None:
        limits, poll = cast("tuple[object, object]", (self.limits, self.poll))
        if not isinstance(limits, Limits):
            raise TypeError(f"limits must be Limits, not {limits!r:.40}; write limits=Limits(rows=500)")
        if not isinstance(poll, tuple) or len(poll) != 2:
            two = "write poll=(timedelta(milliseconds=50), timedelta(seconds=1))"
            raise TypeError(f"poll must be the shortest and the longest pause, not {poll!r:.40}; {two}")
        for name, length in zip(("poll[0]", "poll[1]"), self.poll, strict=True):
            require_window(name, length)
        if self.poll[0] > self.poll[1]:
            raise ValueError(f"poll: the shortest pause, {self.poll[0]}, is longer than the longest, {self.poll[1]}")
        require_window("lease", self.lease)
        require_window("renew_every", self.renew_every)
        require_wait("settle_within", self.settle_within)
        if self.renew_every * 2 > self.lease:
            raise ValueError(f"renew_every {self.renew_every} leaves no second try within a lease of {self.lease}")
