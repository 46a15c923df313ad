"""Progress: rows that say how far a partition is settled, appended at every settle; the newest one counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from outbox.model.lease import Lease, Partition
from outbox.model.position import Position, Progress
from outbox.store.database import Channel

_NEWEST = """
    SELECT base, target, after_id, settled_at FROM {progress}
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition
    ORDER BY epoch DESC, n DESC LIMIT 1
"""
#: One statement settles a batch. It writes only while the lease row has our epoch, and on the server that was read.
_SETTLE = """
    WITH mine AS (
        SELECT 1 AS one FROM {lease}
        WHERE subscription = :subscription AND generation = :generation AND partition = :partition
          AND epoch = :epoch AND {incarnation} = :incarnation {share_lock})
    INSERT INTO {progress}
        (subscription, generation, partition, epoch, n, base, target, after_id, settled_at, last_message)
    SELECT CAST(:subscription AS text), :generation, :partition, :epoch, :n, CAST(:base AS text),
           CAST(:target AS text), CAST(:after AS bigint), {now}, {last_message} FROM mine
    RETURNING n
"""
#: Newest progress whose last message is another one by now; only where positions are ids. By the primary keys.
_GIVEN_AGAIN = """
    SELECT p.subscription, m.id FROM {progress} AS p
    JOIN {message} AS m
      ON m.id = coalesce(p.after_id, CAST(substr(p.base, instr(p.base, ':') + 1) AS integer) - 1)
    WHERE m.message_id <> p.last_message AND NOT EXISTS (
        SELECT 1 FROM {progress} AS newer
        WHERE (newer.subscription, newer.generation, newer.partition) = (p.subscription, p.generation, p.partition)
          AND (newer.epoch, newer.n) > (p.epoch, p.n))
    ORDER BY p.subscription
"""
_KEPT_SECONDS = 86_400.0
#: Never deletes the newest row, whoever wrote it, because it says how far the partition is settled.
_PRUNE = """
    DELETE FROM {progress} AS old
    WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND settled_at < {later} AND EXISTS (
          SELECT 1 FROM {progress} AS newer
          WHERE newer.subscription = old.subscription AND newer.generation = old.generation
            AND newer.partition = old.partition AND (newer.epoch, newer.n) > (old.epoch, old.n))
"""


@dataclass(frozen=True, slots=True)
class Settled:
    """A progress as it is stored."""

    progress: Progress
    settled_at: datetime


class ProgressLog:
    """The progress rows of one outbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        database = channel.database
        names = {"message": database.names["message"]}
        self._settle = database.sql(_SETTLE, last_message=database.dialect.last_message.format(**names))

    def given_again(self) -> dict[str, int]:
        """Return the subscriptions whose last message is another one by now, each with the id of the two.

        Ids were given out again, and the messages up to that id would be passed over. Where positions do not count ids
        there is none.
        """
        if self._channel.database.dialect.transaction_ids:
            return {}
        return {name: id for name, id in self._channel.rows(_GIVEN_AGAIN)}  # noqa: C416 - rows are tuples of any length

    def newest(self, partition: Partition) -> Settled | None:
        """Return the newest progress of a partition, which counts; None: there is none."""
        rows = self._channel.rows(_NEWEST, **partition.parameters)
        if not rows:
            return None
        base, target, after, settled_at = rows[0]
        progress = Progress(Position.parse(base), None if target is None else Position.parse(target), after)
        return Settled(progress, self._channel.database.moment(settled_at))

    def settle(self, lease: Lease, n: int, progress: Progress, incarnation: str) -> bool:
        """Append progress as the lease's `n`-th.

        Return False, with nothing written, when the lease is lost or the server is another.
        """
        parameters = {
            **lease.parameters,
            "n": n,
            "base": str(progress.base),
            "target": None if progress.target is None else str(progress.target),
            "after": progress.after,
            "incarnation": incarnation,
            "last": progress.base.head - 1 if progress.after is None else progress.after,
        }
        return len(self._channel.rows(self._settle, **parameters)) == 1

    def prune(self, partition: Partition) -> None:
        """Delete rows that no longer count, a day after they were written."""
        self._channel.run(_PRUNE, **partition.parameters, seconds=-_KEPT_SECONDS)
