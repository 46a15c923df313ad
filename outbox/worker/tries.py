"""Tries: what is kept of a partition over its leases, and when to try again after a failure."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from outbox.errors import StandbyError
from outbox.store.database import Database
from outbox.worker.settle import Unsettled

#: The longest pause between two tries, and where a failure may last for days.
_PAUSE_SECONDS, LONG_PAUSE_SECONDS = 2.0, 30.0


@dataclass(slots=True)
class Tries:
    """The tries of one partition, or of one subscription to begin at all.

    `unsettled`: what could not be written. `failures`: since it last worked. `again_at`: when to try again, by
    `time.monotonic`. `finished`: everything is handled that is to be handled.
    """

    unsettled: Unsettled = field(default_factory=Unsettled)
    failures: int = 0
    again_at: float = 0.0
    finished: bool = False

    def wait(self, longest: float = _PAUSE_SECONDS) -> None:
        """Try again after a pause, which grows with the failures."""
        self.again_at = time.monotonic() + pause(self.failures, LONG_PAUSE_SECONDS if self.unsettled else longest)


def pause(failures: int, longest: float = _PAUSE_SECONDS) -> float:
    """Return the seconds until another try after so many failures, by chance."""
    return random.uniform(0.05, min(longest, 0.1 * 2 ** min(failures, 10)))


def passes(database: Database, error: Exception, *, known: bool) -> bool:
    """Return whether another try may succeed after this error. `known`: it has succeeded before."""
    # A worker that has worked here waits for the end of a failover, until the address leads to a primary again.
    return (known and isinstance(error, StandbyError)) or database.transient(error)
