"""The settings of a worker: its pace, and how much it takes at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from outbox.store.log.log import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The pace and the limits of a worker; the defaults are what `outbox relay` uses.

    Args:
        limits: how much one read may bring.
        poll: the shortest and the longest pause between two looks at an idle log, where no hint comes.
        lease: for how long a worker that died holds back the others.
        renew_every: how often a lease is renewed; at least twice within its length.
        settle_within: messages that come in quick succession are settled together, at most so long after the handler
            was called with the first. A crash repeats them, and never more than one batch.

    Raises:
        ValueError: `renew_every` leaves no second try within a lease.
    """

    limits: Limits = field(default_factory=Limits)
    poll: tuple[timedelta, timedelta] = (timedelta(milliseconds=50), timedelta(seconds=1))
    lease: timedelta = timedelta(seconds=10)
    renew_every: timedelta = timedelta(seconds=3)
    settle_within: timedelta = timedelta(milliseconds=5)

    def __post_init__(self) -> None:
        if self.renew_every * 2 > self.lease:
            raise ValueError(f"renew_every {self.renew_every} leaves no second try within a lease of {self.lease}")
