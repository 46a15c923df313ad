"""Progress: rows that say how far a partition is settled, appended at every settle; the newest one counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from outbox.errors import DatabaseError
from outbox.model.lease import Lease, Partition
from outbox.model.position import EARLIEST, Position, Progress
from outbox.model.subscription import Subscription
from outbox.store.database import Channel
from outbox.store.dialects.statements import Row, Sql, Statement

_NEWEST = """
    SELECT base, target, after_id, settled_at, epoch, n, {highest} FROM {progress}
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition {upto}
    ORDER BY epoch DESC, n DESC LIMIT 1
"""
#: By the primary key, as the newest.
_UPTO = "AND (epoch, n) <= (:epoch, :n)"
_HIGHEST_N = 2**63 - 1
#: One statement settles a batch. It writes only while the lease row has our epoch and our name, or has had nobody since
#: we looked; and on the server that was read.
_SETTLE = """
    INSERT INTO {progress}
        (subscription, generation, partition, epoch, n, base, target, after_id, settled_at, last_message{into_highest})
    SELECT CAST(:subscription AS {text}), :generation, :partition, :epoch, :n, CAST(:base AS {text}),
           CAST(:target AS {text}), CAST(:after AS {bigint}), {now}, {last_message}{highest}
    FROM (SELECT 1 AS one FROM {lease}
          WHERE subscription = :subscription AND generation = :generation AND partition = :partition
            AND {of_lease} AND {incarnation} = :incarnation {share_lock}) AS mine
    {while_same_ids}
"""
_APPEND = """
    {insert_once} {progress}
        (subscription, generation, partition, epoch, n, base, target, after_id, settled_at, last_message{into_highest})
    VALUES (:subscription, :generation, :partition, :epoch, :n, :base, :target, :after, {now}, {last_message}{highest})
    {unless_there}
"""
_MINE, _FREE = "epoch = :epoch AND owner = :owner", "epoch = :leased AND lease_until IS NULL"
#: Only where positions are ids. The newest progress shows whether ids were given out again, so while it does, no settle
#: may append another one. By the primary keys.
_WHILE_SAME_IDS = """
    WHERE NOT EXISTS (
        SELECT 1 FROM (
            SELECT base, after_id, last_message FROM {progress}
            WHERE subscription = :subscription AND generation = :generation AND partition = :partition
            ORDER BY epoch DESC, n DESC LIMIT 1) AS p
        WHERE {given_again})
"""
#: Newest progress whose last message is another one by now. By the primary keys.
_GIVEN_AGAIN = """
    SELECT p.subscription, p.base, p.after_id FROM {progress} AS p
    WHERE {given_again} AND NOT EXISTS (
        SELECT 1 FROM {progress} AS newer
        WHERE (newer.subscription, newer.generation, newer.partition) = (p.subscription, p.generation, p.partition)
          AND (newer.epoch, newer.n) > (p.epoch, p.n))
    ORDER BY p.subscription
"""
#: The highest id that was passed. Where the caller does not know it, it is the last of the log, which was committed
#: after the position was captured: one probe, for which a huge open transaction makes many.
_HIGHEST = ", coalesce(CAST(:highest AS {bigint}), (SELECT max(id) FROM {message}), 0)"
_KEPT_SECONDS = 86_400.0
#: By primary key.
_THIN = """
    DELETE FROM {progress}
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND epoch = :epoch AND n > :first AND n < :last AND n % :kept <> 0
"""
#: So many pops of a partition leave one row of progress, once another so many have followed.
_THINNED = 100
#: Rows before the newest, which says how far the partition is settled, whoever wrote it.
_PRUNE = """
    DELETE FROM {progress}
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND settled_at < {later} AND (epoch, n) < (:epoch, :n)
"""


@dataclass(frozen=True, slots=True)
class Settled:
    """A progress as it is stored, as the `n`-th of an epoch.

    `highest`: no message with a higher id was passed; None where this is not stored.
    """

    progress: Progress
    settled_at: datetime
    epoch: int
    n: int
    highest: int | None = None


class ProgressLog:
    """The progress rows of one outbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        database, reads = channel.database, channel.database.dialect.reads
        self._given_again: Sql | None = None
        while_same_ids = ""
        if reads.given_again is not None:
            given_again = reads.given_again.format(**database.names)
            self._given_again = database.sql(_GIVEN_AGAIN, given_again=given_again)
            while_same_ids = _WHILE_SAME_IDS.format(**database.names, given_again=given_again)
        parts = {"last_message": reads.last_message.format(**database.names), "highest": "", "into_highest": ""}
        if reads.transaction_ids:
            parts |= {"highest": _HIGHEST.format(**database.names), "into_highest": ", highest_id"}
        self._append = database.sql(_APPEND, **parts)
        self._settle = database.sql(_SETTLE, **parts, of_lease=_MINE, while_same_ids=while_same_ids)
        self._pop = database.sql(_SETTLE, **parts, of_lease=_FREE, while_same_ids=while_same_ids)
        columns = {"highest": "highest_id" if reads.transaction_ids else "NULL"}
        self._newest = database.sql(_NEWEST, **columns, upto="")
        self._newest_upto = database.sql(_NEWEST, **columns, upto=_UPTO)

    def given_again(self) -> dict[str, int]:
        """Return the subscriptions whose last message is another one by now, each with the common id.

        Ids were given out again, and the messages up to that id would be passed over. Empty where positions count no
        ids.
        """
        rows = [] if self._given_again is None else self._channel.rows(self._given_again)
        return {name: _last(Progress(Position.parse(base), None, after)) for name, base, after in rows}

    def require_same_ids(self, subscription: str) -> None:
        """Make sure that ids were not given out again since the subscription passed them.

        To be called before anything is handled, and where a settle wrote nothing.
        """
        id = self.given_again().get(subscription)
        if id is not None:
            raise DatabaseError(
                f"{subscription}: it has passed message {id} of the log, and another message has this id now: ids were"
                " given out again, and new messages would be passed over; run"
                f" {self._channel.database.check_command}, which says how to go on"
            )

    def newest(self, partition: Partition) -> Settled | None:
        """Return the newest progress of a partition, which counts; None: there is none."""
        rows = self._channel.rows(self._newest, **partition.parameters)
        return self.settled(rows[0]) if rows else None

    def first(
        self, newest: Settled, partition: Partition, meant: Callable[[Settled], bool]
    ) -> tuple[Settled, Settled | None]:
        """Return the first stored progress of a partition that is `meant`, and the one before; None: none is stored.

        By halves, because a day has a million rows: after one that is meant, all are. `newest`: one that is meant.
        """

        def upto(epoch: int, n: int) -> Settled | None:
            rows = self._channel.rows(self._newest_upto, **partition.parameters, epoch=epoch, n=n)
            return self.settled(rows[0]) if rows else None

        def first_of(last: int, stored: Callable[[int], Settled | None]) -> int:
            low, high = 0, last
            while low < high:
                middle = (low + high) // 2
                found = stored(middle)
                low, high = (low, middle) if found is not None and meant(found) else (middle + 1, high)
            return low

        epoch = first_of(newest.epoch, lambda epoch: upto(epoch, _HIGHEST_N))
        last = upto(epoch, _HIGHEST_N) or newest
        n = first_of(last.n, lambda n: upto(epoch, n))
        return upto(epoch, n) or last, upto(epoch, n - 1)

    def settled(self, row: Row) -> Settled:
        """Return a progress of a row: base, target, last id, moment, epoch, number, highest id."""
        base, target, after, settled_at, epoch, n, highest = row
        progress = Progress(Position.parse(base), None if target is None else Position.parse(target), after)
        return Settled(progress, self._channel.database.moment(settled_at), epoch, n, highest)

    def standing(self, subscription: Subscription) -> list[Progress]:
        """Return the newest progress of each partition of a subscription."""
        newest = [self.newest(partition) for partition in subscription.all_partitions()]
        return [Progress(EARLIEST) if settled is None else settled.progress for settled in newest]

    def begin(self, partitions: Sequence[Partition], standing: Sequence[Progress]) -> None:
        """Store the first progress of new partitions."""
        for partition, progress in zip(partitions, standing, strict=True):
            self._channel.run(self._append, **partition.parameters, epoch=0, n=0, **_parameters(progress))

    def append(self, partition: Partition, epoch: int, n: int, base: Position) -> None:
        """Store a progress without a lease, for a reader that never asks whether ids were given out again."""
        stored = {**_parameters(Progress(base)), "last": None}
        self._channel.run(self._append, **partition.parameters, epoch=epoch, n=n, **stored)

    def settle(self, lease: Lease, n: int, progress: Progress, incarnation: str, highest: int | None = None) -> bool:
        """Append progress as the `n`-th of the lease. `highest`: no message with a higher id was passed.

        Return False, with nothing written, when the lease is lost, the server is another, or ids were given out again
        (see `given_again`).
        """
        stored = {**_parameters(progress), "highest": highest}
        parameters = {**lease.parameters, "n": n, "incarnation": incarnation, **stored}
        return self._channel.run(self._settle, **parameters) == 1

    def pop(
        self, partition: Partition, before: Settled, leased: int, progress: Progress, incarnation: str
    ) -> Statement:
        """Return the statement that appends progress where nobody has the lease, behind the newest one.

        The transaction has the partition alone among those that have no lease. The statement writes nothing where
        `settle` would not, or somebody has taken the lease. `leased`: the epoch of the lease, which was free.
        `progress`: with the highest id as it was `before`, or as the caller then sets it.
        """
        # A progress with the number 1 says that the holder of a lease has begun, and settled nothing.
        number = {"epoch": before.epoch, "n": max(before.n + 1, 2), "leased": leased, "incarnation": incarnation}
        return Statement(self._pop, {**partition.parameters, **number, **_parameters(progress)})

    def thin(self, partition: Partition, newest: Settled) -> None:
        """Delete most of the progress that pops have stored: of each hundred rows one is left, but not of the newest.

        Called after each pop; now and then there is something to do.
        """
        if newest.n % _THINNED == 0:
            between = {"first": newest.n - 3 * _THINNED, "last": newest.n - _THINNED, "kept": _THINNED}
            self._channel.run(_THIN, **partition.parameters, epoch=newest.epoch, **between)

    def prune(self, partition: Partition) -> None:
        """Delete rows that no longer count, a day after they were written."""
        newest = self.newest(partition)
        if newest is not None:
            bounds = {"epoch": newest.epoch, "n": newest.n, "seconds": -_KEPT_SECONDS}
            self._channel.run(_PRUNE, **partition.parameters, **bounds)


def _parameters(progress: Progress) -> dict[str, object]:
    return {
        "base": str(progress.base),
        "target": None if progress.target is None else str(progress.target),
        "after": progress.after,
        "last": _last(progress),
        "highest": None,
    }


def _last(progress: Progress) -> int:
    """Return the highest id that was passed, where positions are ids."""
    return progress.base.head - 1 if progress.after is None else progress.after
