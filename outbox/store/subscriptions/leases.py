"""Leases: the right of one worker at a time to a partition, fenced by an epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from outbox.model.lease import Holder, Lease, Partition, Sight
from outbox.runtime.clock import clock
from outbox.runtime.process import library_version
from outbox.store.database import Channel
from outbox.store.dialects.statements import Statement

#: A command that wants the leases of a subscription has a row in place of this partition, which no worker owns. So its
#: bid ends with the row, which it has to renew, and workers of earlier versions do not notice it.
_BID = -1
#: For so many seconds a bid counts. One that lasts longer was made before the clock of the database stepped back.
BID_SECONDS = 5.0

_ACQUIRE = """
    UPDATE {lease} SET owner = :owner, epoch = epoch + 1, renewals = 0, lease_until = {later}, length_ms = :length,
           version = :version, attempts = :attempts,
           since = CASE WHEN owner = :owner AND since IS NOT NULL THEN since ELSE {now} END
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND (lease_until IS NULL OR owner = :owner OR (epoch = :seen_epoch AND renewals = :seen_renewals))
"""
#: In the same transaction: the lease has this owner if it was acquired.
_ACQUIRED = """
    SELECT epoch FROM {lease} WHERE subscription = :subscription AND generation = :generation
      AND partition = :partition AND owner = :owner
"""
#: No lease has this epoch.
_NONE_SEEN = -1
#: Not one that was given back meanwhile, by the thread that does not renew.
_RENEW = """
    UPDATE {lease} SET lease_until = {later}, renewals = renewals + 1
    WHERE (subscription, generation, partition, epoch, owner) IN ({these})
"""
_STILL_OURS = """
    SELECT subscription, generation, partition, epoch, owner FROM {lease}
    WHERE (subscription, generation, partition, epoch, owner) IN ({these})
"""
_RELEASE = """
    UPDATE {lease} SET lease_until = NULL, owner = NULL, version = NULL, since = NULL, attempts = NULL
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition AND epoch = :epoch
      AND owner = :owner
"""
#: Workers of two configurations may differ.
_ATTEMPTS = """
    SELECT DISTINCT attempts FROM {lease}
    WHERE subscription = :subscription AND partition >= 0 AND attempts IS NOT NULL AND lease_until > {now}
"""
_LOOK = """
    SELECT subscription, generation, partition, owner, epoch, renewals, lease_until,
           CASE WHEN lease_until > {now} THEN 1 ELSE 0 END, length_ms, notice, noticed_at, version,
           since, (
               SELECT count(*) FROM {lease} AS bid
               WHERE bid.subscription = looked.subscription AND bid.generation = looked.generation
                 AND bid.partition = {bid} AND bid.lease_until > {now} AND bid.lease_until <= {longest})
    FROM {lease} AS looked WHERE (subscription, generation, partition) IN ({these})
"""
#: One row for all commands that want the lease: the last of them to renew it has its name in it.
_ASK_AGAIN = """
    UPDATE {lease} SET owner = :owner, lease_until = {longest}
    WHERE subscription = :subscription AND generation = :generation AND partition = {bid}
"""
_ASK = """
    {insert_once} {lease} (subscription, generation, partition, owner, epoch, renewals, lease_until)
    VALUES (:subscription, :generation, {bid}, :owner, 0, 0, {longest}) {unless_there}
"""
_TAKE_BACK = """
    DELETE FROM {lease}
    WHERE subscription = :subscription AND generation = :generation AND partition = {bid} AND owner = :owner
"""
#: A notice that is repeated keeps its first moment.
_NOTICE = """
    UPDATE {lease} SET noticed_at = CASE WHEN notice = :notice THEN noticed_at ELSE {later} END, notice = :notice
    WHERE subscription = :subscription AND partition >= 0
"""
#: Prevents a new epoch until the transaction ends, without writing a new version of the row.
_HOLD = """
    SELECT 1 FROM {lease} WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND epoch = :epoch AND owner = :owner AND {incarnation} = :incarnation {share_lock}
"""


#: The server checks the right to read a table also for no rows.
_READ_NOTHING = "SELECT 1 FROM {lease} WHERE FALSE"


class LeaseWatch:
    """Watches the lease of a partition for a worker that stands by, or for a command.

    Time is counted by the watcher's clock, because the database's clock may step. A lease that was not given back is
    claimed after it has stood still for the holder's length, at the first look too, and even if it has expired by the
    database's clock: the holder may be well, and the clock may have stepped forward a moment ago.
    """

    def __init__(self, length: timedelta, now: Callable[[], float] = clock) -> None:
        """`length`: for a holder without a stored length."""
        self._length = length
        self._now = now
        self._sight: Sight | None = None

    def look(self, holder: Holder) -> Holder | None:
        """Note the holder as it is now; return the holder if the lease may be claimed, else None."""
        now = self._now()
        self._sight = Sight.of(holder, now, self._sight)
        return holder if self._sight.stood_still(now, self._length) else None


class Leases:
    """The lease rows of one outbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._database = channel.database
        self._bids = {"bid": str(_BID), "longest": self._database.later(str(BID_SECONDS))}
        self._ask_again, self._ask, self._take_back = (
            self._database.sql(each, **self._bids) for each in (_ASK_AGAIN, _ASK, _TAKE_BACK)
        )

    def acquire(
        self,
        partition: Partition,
        owner: str,
        length: timedelta,
        claim: Holder | None = None,
        *,
        attempts: int | None = None,
    ) -> Lease | None:
        """Take a lease that was given back, is the owner's, or is still as `claim` says; None if it is neither.

        The lease gets the next epoch. An owner that lost its connection takes its lease back at once; the new epoch
        fences off earlier writes. `claim`: the result of a `LeaseWatch`; None: no lease of another owner. `attempts`:
        so many failures of a message the owner allows; None: the owner handles no messages.
        """
        epoch, renewals = (_NONE_SEEN, 0) if claim is None else (claim.epoch, claim.renewals)
        parameters: dict[str, object] = {
            **partition.parameters,
            "owner": owner,
            "seconds": length.total_seconds(),
            "length": length // timedelta(milliseconds=1),
            "version": library_version(),
            "attempts": attempts,
            "seen_epoch": epoch,
            "seen_renewals": renewals,
        }
        rows = self._channel.rows_of_last([Statement(_ACQUIRE, parameters), Statement(_ACQUIRED, parameters)])
        return Lease(partition, rows[0][0], owner) if rows else None

    def renew(self, lease: Lease, length: timedelta) -> bool:
        """Extend the lease; return False when it was taken under another epoch, or given back."""
        return lease in self.renew_all([lease], length)

    def renew_all(self, leases: Collection[Lease], length: timedelta) -> set[Lease]:
        """Extend these leases, in one statement; return the leases that are still ours."""
        ours = {(*_key_of(lease.partition), lease.epoch, lease.owner): lease for lease in leases}
        these, parameters = self._listed(list(ours))
        renew = self._database.sql(_RENEW, these=these)
        if self._channel.run(renew, **parameters, seconds=length.total_seconds()) == len(ours):
            return set(ours.values())
        rows = self._channel.rows(self._database.sql(_STILL_OURS, these=these), **parameters)
        return {ours[tuple(row)] for row in rows}

    def release(self, lease: Lease) -> None:
        """Give the lease back, if it is still ours."""
        self._channel.run(_RELEASE, **lease.parameters)

    def attempts(self, subscription: str) -> int | None:
        """Return how many failures of a message the workers of a subscription allow; None: unknown, or several."""
        rows = self._channel.rows(_ATTEMPTS, subscription=subscription)
        return int(rows[0][0]) if len(rows) == 1 else None

    def require_readable(self) -> None:
        """Raise the driver's error if the role must not read leases."""
        self._channel.rows(_READ_NOTHING)

    def look(self, partition: Partition) -> Holder | None:
        """Return the holder of a partition; None: there is no such partition."""
        return self.look_all([partition]).get(partition)

    def look_all(self, partitions: Collection[Partition]) -> Mapping[Partition, Holder]:
        """Return the holders of these partitions, as far as they are there, in one statement."""
        looked = {_key_of(partition): partition for partition in partitions}
        these, parameters = self._listed(list(looked))
        look = self._database.sql(_LOOK, these=these, **self._bids)
        rows = self._channel.rows(look, **parameters)
        return {looked[row[0], row[1], row[2]]: self._holder(*row[3:]) for row in rows}

    def _holder(
        self, owner: str | None, epoch: int, renewals: int, until: Any, live: int, length: int | None, *rest: Any
    ) -> Holder:
        notice, noticed, version, since, bids = rest
        moment = self._database.dialect.clock.read
        return Holder(
            owner,
            epoch,
            renewals,
            moment(until),
            bool(live),
            None if length is None else timedelta(milliseconds=length),
            notice,
            moment(noticed),
            bool(bids),
            version,
            moment(since),
        )

    def ask(self, partition: Partition, command: str) -> None:
        """Ask the workers of a subscription for its leases; asked again before `BID_SECONDS` are over, it goes on."""
        asked = {**partition.parameters, "owner": command}
        if not self._channel.run(self._ask_again, **asked):
            self._channel.run(self._ask, **asked)

    def take_back(self, partition: Partition, command: str) -> None:
        """Want the leases no longer, unless another command has asked since."""
        self._channel.run(self._take_back, owner=command, **partition.parameters)

    def note(self, subscription: str, notice: str | None, *, since: float = 0.0) -> None:
        """Write on the leases of a subscription why a worker does not work; None: one does work. Nothing else changes.

        `since`: for how many seconds the reason has lasted.
        """
        self._channel.run(_NOTICE, subscription=subscription, notice=notice, seconds=-since)

    def _listed(self, rows: Sequence[Sequence[object]]) -> tuple[str, dict[str, object]]:
        bound = {f"v{number}_{column}": value for number, row in enumerate(rows) for column, value in enumerate(row)}
        listed = (
            f"({', '.join(f':v{number}_{column}' for column in range(len(row)))})" for number, row in enumerate(rows)
        )
        return self._database.dialect.values.rows.format(rows=", ".join(listed)), bound

    def hold(self, lease: Lease, incarnation: str) -> bool:
        """Keep the lease until the end of the transaction; return False when it is lost, or the server is another."""
        return bool(self._channel.rows(_HOLD, **lease.parameters, incarnation=incarnation))


def _key_of(partition: Partition) -> tuple[object, ...]:
    return partition.subscription, partition.generation, partition.partition
