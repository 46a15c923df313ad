"""Generations of partitions: each has a number of partitions, which all begin at the same progress.

The next generation begins in one transaction that deletes the leases of the last one, so that no worker of the last one
can settle any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outbox.model.barrier import has_arrived, next_generation, stop_at
from outbox.model.position import Position, Progress
from outbox.model.subscription import Subscription
from outbox.store.database import Channel
from outbox.store.subscriptions.progress import ProgressLog

_LEASE = """
    {insert_once} {lease} (subscription, generation, partition, epoch, renewals)
    VALUES (:subscription, :generation, :partition, 0, 0) {unless_there}
"""
#: Of a generation, with what commands and workers have left in place of a lease; not the notices of refused workers,
#: which belong to the name.
_END = """
    DELETE FROM {table} WHERE subscription = :name AND generation = :generation AND partition >= -1
"""
_NEXT = """
    UPDATE {subscription} SET partitions = :partitions, generation = :generation, stop_at = NULL, next_partitions = NULL
    WHERE name = :name
"""
_ORDER = "UPDATE {subscription} SET stop_at = :stop_at, next_partitions = :partitions WHERE name = :name"
#: Locks the leases, so that nobody takes one until the transaction ends.
_GIVEN_BACK = """
    SELECT CASE WHEN lease_until IS NULL THEN 1 ELSE 0 END FROM {lease}
    WHERE subscription = :name AND generation = :generation AND partition >= 0 {share_lock}
"""


class Generations:
    """The generations of partitions in one outbox; for use inside `Subscriptions.changing`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._progress = ProgressLog(channel)

    def begin(self, subscription: Subscription, standing: Sequence[Progress]) -> None:
        """Create the leases of all partitions, and their first progress."""
        partitions = subscription.all_partitions()
        for partition in partitions:
            self._channel.run(_LEASE, **partition.parameters)
        self._progress.begin(partitions, standing)

    def order(self, subscription: Subscription, partitions: int) -> None:
        """Give a subscription another number of partitions; the caller holds all leases.

        If all partitions stand at the same progress, the next generation begins. Otherwise the number is stored, with
        the position at which the partitions have to meet, and `advance` begins the generation later. The present number
        takes an order back.
        """
        standing = self._progress.standing(subscription)
        start = next_generation(standing)
        if partitions == subscription.partitions:
            self.take_back(subscription)
        elif start is not None:
            self._begin_next(subscription, partitions, start)
        else:
            stop = str(stop_at(standing))
            self._channel.run(_ORDER, name=subscription.name, stop_at=stop, partitions=partitions)

    def restart(self, subscription: Subscription, start: Progress) -> None:
        """Begin the next generation at another progress; the caller holds all leases.

        The new partitions have nothing in common with the old ones, whatever a process still knows of these. An ordered
        number of partitions counts at once, because all partitions stand at the same progress.
        """
        self._begin_next(subscription, subscription.next_partitions or subscription.partitions, start)

    def take_back(self, subscription: Subscription) -> None:
        """Take the order of another number back. No lease is needed: nobody has passed the position to meet at."""
        self._channel.run(_ORDER, name=subscription.name, stop_at=None, partitions=None)

    def advance(self, subscription: Subscription) -> bool:
        """Begin the next generation if one was ordered, all partitions have met, and all leases were given back.

        Return whether it began.
        """
        if subscription.next_partitions is None:
            return False
        start = self._met_at(subscription)
        if start is None:
            return False
        self._begin_next(subscription, subscription.next_partitions, start)
        return True

    def end_at(self, subscription: Subscription, stop: Position) -> None:
        """Let the partitions handle the log up to a position, and no further."""
        self._channel.run(_ORDER, name=subscription.name, stop_at=str(stop), partitions=None)

    def ended(self, subscription: Subscription) -> bool:
        """Return whether all partitions stand at their end, and all leases were given back."""
        standing, stop = self._met_at(subscription), subscription.stop_at
        return standing is not None and stop is not None and has_arrived(standing, stop)

    def _met_at(self, subscription: Subscription) -> Progress | None:
        """Return where all partitions stand, if that is the same progress, and all leases were given back."""
        # First the lock: a worker that takes a lease, settles and gives it back would move a partition meanwhile.
        if not self._are_given_back(subscription):
            return None
        return next_generation(self._progress.standing(subscription))

    def _begin_next(self, last: Subscription, partitions: int, start: Progress) -> None:
        following = replace(last, partitions=partitions, generation=last.generation + 1)
        for table in ("lease", "progress"):
            statement = self._channel.database.sql(_END, table=self._channel.database.names[table])
            self._channel.run(statement, name=last.name, generation=last.generation)
        self._channel.run(_NEXT, name=last.name, partitions=partitions, generation=following.generation)
        self.begin(following, [start] * partitions)

    def _are_given_back(self, subscription: Subscription) -> bool:
        rows = self._channel.rows(_GIVEN_BACK, name=subscription.name, generation=subscription.generation)
        return all(given_back for (given_back,) in rows)
