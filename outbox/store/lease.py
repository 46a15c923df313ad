"""Leases: the right of one worker at a time to a partition, fenced by an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.store.database import Database
from outbox.store.dialect import Channel

_ACQUIRE = """
    UPDATE {lease} SET owner = :owner, epoch = epoch + 1, renewals = 0, lease_until = {until}
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND (lease_until IS NULL OR lease_until <= {now} OR owner = :owner
           OR (epoch = :seen_epoch AND renewals = :seen_renewals))
    RETURNING epoch
"""
_RENEW = """
    UPDATE {lease} SET lease_until = {until}, renewals = renewals + 1
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition AND epoch = :epoch
"""
_RELEASE = """
    UPDATE {lease} SET lease_until = NULL, owner = NULL
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition AND epoch = :epoch
"""
_LOOK = """
    SELECT owner, epoch, renewals, lease_until, CASE WHEN lease_until > {now} THEN 1 ELSE 0 END FROM {lease}
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition
"""
#: Holds the row against a new epoch until the transaction ends, without a new version of it.
_HOLD = """
    SELECT 1 FROM {lease} WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND epoch = :epoch AND {incarnation} = :incarnation {lock}
"""


@dataclass(frozen=True, slots=True)
class Partition:
    """What a lease is for."""

    subscription: str
    generation: int = 1
    partition: int = 0

    @property
    def parameters(self) -> dict[str, object]:
        """The key of its rows."""
        return {"subscription": self.subscription, "generation": self.generation, "partition": self.partition}


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to a partition, under an epoch that nobody else will ever have."""

    partition: Partition
    epoch: int
    owner: str

    @property
    def parameters(self) -> dict[str, object]:
        """The key of its row, and the epoch that a write has to match."""
        return {**self.partition.parameters, "epoch": self.epoch}


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, as others see it."""

    owner: str | None
    epoch: int
    renewals: int
    lease_until: datetime | None
    live: bool


class Leases:
    """The lease rows of one outbox."""

    def __init__(self, database: Database) -> None:
        until = database.later(":seconds")
        self._database = database
        self._acquire = database.sql(_ACQUIRE, until=until)
        self._renew = database.sql(_RENEW, until=until)
        self._release = database.sql(_RELEASE)
        self._look = database.sql(_LOOK)
        self._hold = database.sql(_HOLD, incarnation=database.dialect.incarnation, lock=database.dialect.share_lock)

    def acquire(
        self, channel: Channel, partition: Partition, owner: str, length: timedelta, seen: Holder | None = None
    ) -> Lease | None:
        """Take a lease that is free, has expired by the database's clock or is the owner's own, under the next epoch.

        An owner that lost its connection takes its own lease back at once: the epoch fences what it was at before.
        `seen`: a holder that was the same, renewals and all, for a whole lease by the caller's own clock; the
        database's clock may have stepped back.
        """
        parameters = {
            **partition.parameters,
            "owner": owner,
            "seconds": length.total_seconds(),
            "seen_epoch": -1 if seen is None else seen.epoch,
            "seen_renewals": -1 if seen is None else seen.renewals,
        }
        rows = channel.rows(self._acquire, parameters)
        return Lease(partition, rows[0][0], owner) if rows else None

    def renew(self, channel: Channel, lease: Lease, length: timedelta) -> bool:
        """Extend the lease; False when it has gone to another epoch."""
        return channel.run(self._renew, {**lease.parameters, "seconds": length.total_seconds()}) == 1

    def release(self, channel: Channel, lease: Lease) -> None:
        """Give the lease back, if it is still ours."""
        channel.run(self._release, lease.parameters)

    def look(self, channel: Channel, partition: Partition) -> Holder | None:
        """Who holds the partition; None when there is no such partition."""
        rows = channel.rows(self._look, partition.parameters)
        if not rows:
            return None
        owner, epoch, renewals, until, live = rows[0]
        return Holder(owner, epoch, renewals, self._database.dialect.moment(until), bool(live))

    def hold(self, channel: Channel, lease: Lease, incarnation: str) -> bool:
        """Inside a transaction: keep the lease until its end; False when it is lost, or the server is another."""
        return bool(channel.rows(self._hold, {**lease.parameters, "incarnation": incarnation}))
