"""The failures of one subscription in a worker: what is said of them, and when each partition is tried again."""

from __future__ import annotations

import logging

from outbox.errors import LeaseLostError, SubscriptionError
from outbox.model.lease import Partition
from outbox.runtime.throttled_log import ThrottledLog
from outbox.store.database import Channel
from outbox.store.failure import in_one_line
from outbox.worker.connection import Connection
from outbox.worker.notice import Notice
from outbox.worker.tries import LONG_PAUSE_SECONDS, Tries, passes

logger = logging.getLogger("outbox")


class Failures:
    """Kept over all leases and connections."""

    def __init__(self, subscription: str, notice: Notice, *, optional: bool) -> None:
        """`optional`: what goes wrong with the subscription does not end the worker."""
        self._subscription = subscription
        self._notice = notice
        self._optional = optional
        self._throttled_log = ThrottledLog(logger)
        self._tries: dict[Partition | None, Tries] = {}

    def tries(self, partition: Partition | None = None) -> Tries:
        """Return the tries of a partition; None: those to declare the subscription."""
        return self._tries.setdefault(partition, Tries())

    def begin(self) -> None:
        """Begin to work, with everything still to be handled."""
        for each in self._tries.values():
            each.finished = False

    @property
    def some(self) -> bool:
        """True while a partition, or the subscription, has failed since it last worked."""
        return any(each.failures for each in self._tries.values())

    def note(self, line: str) -> None:
        """Write why the worker does not work to where `outbox status` reads it."""
        self._notice.write(line)

    def withdraw_note(self, channel: Channel) -> None:
        """Remove what was written there."""
        self._notice.withdraw(channel)

    def warn(self, line: str) -> None:
        """Log what a person should know, once in a while."""
        self._throttled_log.warning("%s: %s", self._subscription, line)

    def lease_lost(self, error: LeaseLostError, tries: Tries) -> None:
        """Log it, and try again soon."""
        self._throttled_log.warning("%s", error)
        tries.wait()

    def explain_or_raise(self, error: Exception, tries: Tries, connection: Connection, *, known: bool) -> None:
        """Log the error, and try again later, if another try may succeed; otherwise raise it.

        `known`: the subscription was declared before.
        """
        tries.failures += 1
        tries.wait()
        endless = connection.until == "stopped"
        passing = passes(connection.channel.database, error, known=known)
        line, _ = in_one_line(error)
        # Where its declaration is refused, that was noted already, because such a worker may have no lease.
        noted = isinstance(error, SubscriptionError)
        if tries.unsettled and tries.unsettled.explains(error) and (passing or endless):
            # Also errors that only a person can mend, because a new process would send the batch again.
            line = f"settling fails, and nothing is sent until it works again: {line}"
        elif passing:
            self._throttled_log.warning("the database is away, trying again: %s", type(error).__name__)
            return
        elif self._optional and endless:
            # The other subscriptions of the worker do not depend on this one.
            tries.wait(LONG_PAUSE_SECONDS)
            line = f"cannot work, trying again: {line}"
        else:
            if not noted:
                self._notice.write(line)
            raise error
        if self._throttled_log.warning("%s: %s", self._subscription, line) and not noted:
            self._notice.write(line)
