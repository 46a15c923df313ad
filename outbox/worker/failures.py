"""Failures of one subscription in a worker: when each partition is tried again, and the log lines."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field

from outbox.errors import LeaseLostError, StandbyError, SubscriptionError
from outbox.model.lease import Partition
from outbox.runtime.named import named
from outbox.runtime.throttled_log import ThrottledLog
from outbox.store.database import Database
from outbox.store.failure import in_one_line
from outbox.worker.notice import Notice
from outbox.worker.settle import Unsettled

logger = logging.getLogger("outbox")

#: The longest pause between two tries, and where a failure may last for days.
_PAUSE_SECONDS, _LONG_PAUSE_SECONDS = 2.0, 30.0


def pause(failures: int, longest: float = _PAUSE_SECONDS) -> float:
    """Return the seconds until another try after so many failures, by chance."""
    return random.uniform(0.05, min(longest, 0.1 * 2 ** min(failures, 10)))


def passes(database: Database, error: Exception, *, known: bool) -> bool:
    """Return whether another try may succeed after an error. `known`: a try has succeeded before."""
    # A worker that has worked here waits for the end of a failover, until the address leads to a primary again.
    return (known and isinstance(error, StandbyError)) or database.transient(error)


def log_away(log: ThrottledLog, why: str) -> None:
    """Log once in a while that the database is away."""
    log.warning("the database is away, trying again: %s", why, extra=named("database_away", error=why))


@dataclass(slots=True)
class Tries:
    """The tries of one partition, or of one subscription to begin at all, over all leases.

    `unsettled`: the writes that failed. `failures`: since the last success. `again_at`: when to try again, by
    `time.monotonic`. `finished`: everything is handled that is to be handled.
    """

    unsettled: Unsettled = field(default_factory=Unsettled)
    failures: int = 0
    again_at: float = 0.0
    finished: bool = False

    def wait(self, longest: float = _PAUSE_SECONDS) -> None:
        """Try again after a pause, which grows with the failures."""
        self.again_at = time.monotonic() + pause(self.failures, _LONG_PAUSE_SECONDS if self.unsettled else longest)


class Failures:
    """Kept over all leases and connections."""

    def __init__(self, subscription: str, notice: Notice, *, optional: bool) -> None:
        """`optional`: an error of the subscription does not end the worker."""
        self._subscription = subscription
        self.notice = notice
        self._optional = optional
        self._throttled_log = ThrottledLog(logger)
        self._tries: dict[Partition | None, Tries] = {}

    def tries(self, partition: Partition | None = None) -> Tries:
        """Return the tries of a partition; None: the tries to declare the subscription."""
        return self._tries.setdefault(partition, Tries())

    def begin(self) -> None:
        """Begin to work, with everything still to be handled."""
        for each in self._tries.values():
            each.finished = False

    @property
    def some(self) -> bool:
        """True while a partition, or the subscription, has failed and has not worked since."""
        return any(each.failures for each in self._tries.values())

    def warn(self, line: str) -> None:
        """Log a line for a person, once in a while."""
        self._throttled_log.warning("%s: %s", self._subscription, line)

    def lease_lost(self, error: LeaseLostError, tries: Tries) -> None:
        """Log the error, and try again soon."""
        self._throttled_log.warning("%s", error)
        tries.wait()

    def explain_or_raise(
        self, error: Exception, tries: Tries, database: Database, *, known: bool, endless: bool
    ) -> None:
        """Log the error, and try again later, if another try may succeed; otherwise raise the error.

        `known`: the subscription was declared before. `endless`: the worker works until a stop.
        """
        tries.failures += 1
        tries.wait()
        passing = passes(database, error, known=known)
        line, _ = in_one_line(error, database.commands)
        # A refused declaration was noted already, because such a worker may have no lease.
        noted = isinstance(error, SubscriptionError)
        if tries.unsettled and tries.unsettled.explains(error) and (passing or endless):
            # Also errors that only a person can mend, because a new process would send the batch again.
            line = f"settling fails, and nothing is sent until it works again: {line}"
        elif passing:
            log_away(self._throttled_log, line)
            return
        elif self._optional and endless:
            # The other subscriptions of the worker do not depend on this one.
            tries.wait(_LONG_PAUSE_SECONDS)
            line = f"cannot work, trying again: {line}"
        else:
            if not noted:
                self.notice.write(line)
            raise error
        if self._throttled_log.warning("%s: %s", self._subscription, line) and not noted:
            self.notice.write(line)
