"""Leases: the right of one worker at a time to a partition, fenced by an epoch."""

from __future__ import annotations

from datetime import timedelta

from outbox.model.lease import EXPIRED, Claim, Holder, Lease, Partition
from outbox.store.database import Database
from outbox.store.dialects.dialect import Channel

_ACQUIRE = """
    UPDATE {lease} SET owner = :owner, epoch = epoch + 1, renewals = 0, lease_until = {until}, length_ms = :length
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND (lease_until IS NULL OR owner = :owner OR ({claimed}))
    RETURNING epoch
"""
_EXPIRED = "lease_until <= {now}"
_AS_SEEN = "epoch = :seen_epoch AND renewals = :seen_renewals"
_RENEW = """
    UPDATE {lease} SET lease_until = {until}, renewals = renewals + 1
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition AND epoch = :epoch
"""
_RELEASE = """
    UPDATE {lease} SET lease_until = NULL, owner = NULL
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition AND epoch = :epoch
"""
_LOOK = """
    SELECT owner, epoch, renewals, lease_until, CASE WHEN lease_until > {now} THEN 1 ELSE 0 END, length_ms, notice,
           noticed_at
    FROM {lease} WHERE subscription = :subscription AND generation = :generation AND partition = :partition
"""
#: A notice that is repeated keeps its first moment.
_NOTICE = """
    UPDATE {lease} SET noticed_at = CASE WHEN notice = :notice THEN noticed_at ELSE {since} END, notice = :notice
    WHERE subscription = :subscription
"""
#: Prevents a new epoch until the transaction ends, without writing a new version of the row.
_HOLD = """
    SELECT 1 FROM {lease} WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND epoch = :epoch AND {incarnation} = :incarnation {lock}
"""


class Leases:
    """The lease rows of one outbox."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._until = database.later(":seconds")
        self._renew = database.sql(_RENEW, until=self._until)
        self._release = database.sql(_RELEASE)
        self._look = database.sql(_LOOK)
        self._notice = database.sql(_NOTICE, since=database.later(":seconds"))
        self._hold = database.sql(_HOLD, incarnation=database.dialect.incarnation, lock=database.dialect.share_lock)

    def acquire(
        self, channel: Channel, partition: Partition, owner: str, length: timedelta, claim: Claim | None = EXPIRED
    ) -> Lease | None:
        """Take a lease that was given back, is the owner's own, or may be claimed; None if it is none of these.

        The lease gets the next epoch. An owner that lost its connection takes its own lease back at once; the new epoch
        fences off the writes that it had begun before. `claim`: which other leases may be taken; None: no other.
        """
        parameters: dict[str, object] = {
            **partition.parameters,
            "owner": owner,
            "seconds": length.total_seconds(),
            "length": length // timedelta(milliseconds=1),
        }
        conditions = ["TRUE"] if claim is not None else ["FALSE"]
        if claim is not None and claim.expired:
            conditions.append(self._database.sql(_EXPIRED))
        if claim is not None and claim.seen is not None:
            conditions.append(_AS_SEEN)
            parameters |= {"seen_epoch": claim.seen.epoch, "seen_renewals": claim.seen.renewals}
        statement = self._database.sql(_ACQUIRE, until=self._until, claimed=" AND ".join(conditions))
        rows = channel.rows(statement, parameters)
        return Lease(partition, rows[0][0], owner) if rows else None

    def renew(self, channel: Channel, lease: Lease, length: timedelta) -> bool:
        """Extend the lease; return False when it was taken under another epoch."""
        return channel.run(self._renew, {**lease.parameters, "seconds": length.total_seconds()}) == 1

    def release(self, channel: Channel, lease: Lease) -> None:
        """Give the lease back, if it is still ours."""
        channel.run(self._release, lease.parameters)

    def look(self, channel: Channel, partition: Partition) -> Holder | None:
        """Return who holds the partition; None when there is no such partition."""
        rows = channel.rows(self._look, partition.parameters)
        if not rows:
            return None
        owner, epoch, renewals, until, live, length, notice, noticed = rows[0]
        moment = self._database.dialect.moment
        return Holder(
            owner,
            epoch,
            renewals,
            moment(until),
            bool(live),
            None if length is None else timedelta(milliseconds=length),
            notice,
            moment(noticed),
        )

    def note(self, channel: Channel, subscription: str, notice: str | None, *, since: float = 0.0) -> None:
        """Write on the leases of a subscription why a worker does not work; None: one does work. Nothing else changes.

        `since`: for how many seconds the reason has lasted.
        """
        channel.run(self._notice, {"subscription": subscription, "notice": notice, "seconds": -since})

    def hold(self, channel: Channel, lease: Lease, incarnation: str) -> bool:
        """Keep the lease until the end of the transaction; return False when it is lost, or the server is another."""
        return bool(channel.rows(self._hold, {**lease.parameters, "incarnation": incarnation}))
