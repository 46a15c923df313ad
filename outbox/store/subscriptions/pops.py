"""Pops: reads of a subscription that has no worker, each of them one short transaction.

A pop parks what it hands out, until a time is over. Pops of a partition follow each other; a pop writes nothing while
somebody has the lease of the partition.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from outbox.errors import LeaseLostError
from outbox.model.lease import Partition
from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.position import Progress
from outbox.model.subscription import Subscription
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS, OF_SLOTS, slots_of
from outbox.store.subscriptions.parked import Parked, Ready
from outbox.store.subscriptions.progress import ProgressLog, Settled
from outbox.store.subscriptions.subscriptions import COLUMNS as OF_SUBSCRIPTION
from outbox.store.subscriptions.subscriptions import Subscriptions

#: Among the advisory locks of a database. No lock of a row, which would draw a transaction id: a position cannot be
#: captured afterwards.
_SEED = zlib.crc32(b"outbox pop")
#: At most so many messages of a key go out together.
MOST_OF_KEY = 32
#: Heads that can be handed out: none of what went out together is left in other hands. A delayed message of a key first
#: joins the unit of its key. By the indexes on due_at and of units.
_OUT = f"""
    p.subscription = :subscription AND p.state IN ('delayed', 'waiting', 'retry') AND p.due_at <= {{now}}
    AND (p.state <> 'delayed' OR p.key IS NULL OR {{unordered}}) {{of_slots}}
    AND NOT EXISTS (
        SELECT 1 FROM {{parked}} AS o WHERE o.subscription = :subscription AND o.unit = p.unit
          AND o.place > p.place AND o.place < p.place + {MOST_OF_KEY} AND o.due_at > {{now}})
"""
#: Everything that a pop has to know before it reads the log, by primary keys and partial indexes: one probe each.
_STANDING = f"""
    SELECT {{columns}}, l.epoch, CASE WHEN l.lease_until IS NULL THEN 1 ELSE 0 END,
           s_base, s_target, s_after, s_at, s_epoch, s_n, s_highest,
           CASE WHEN EXISTS (SELECT 1 FROM {{decision}} AS d WHERE d.subscription = :subscription AND d.done_at IS NULL)
                THEN 1 ELSE 0 END,
           CASE WHEN s.ordered AND EXISTS (
                SELECT 1 FROM {{parked}} AS p WHERE p.subscription = :subscription AND p.state = 'delayed'
                AND p.key IS NOT NULL AND p.due_at <= {{now}} {{of_slots}}) THEN 1 ELSE 0 END,
           CASE WHEN EXISTS (SELECT 1 FROM {{parked}} AS p WHERE {_OUT}) THEN 1 ELSE 0 END,
           CASE WHEN EXISTS (SELECT 1 FROM {{parked}} AS p WHERE p.subscription = :subscription
                AND p.unit IS NOT NULL AND p.state IS NOT NULL) THEN 1 ELSE 0 END,
           {{incarnation}}, {{now}}
    FROM (SELECT base AS s_base, target AS s_target, after_id AS s_after, settled_at AS s_at, epoch AS s_epoch,
                 n AS s_n, {{highest}} AS s_highest
          FROM {{progress}}
          WHERE subscription = :subscription AND partition = :partition
            AND generation = (SELECT generation FROM {{subscription}} WHERE name = :subscription)
          ORDER BY epoch DESC, n DESC LIMIT 1) AS newest
    CROSS JOIN {{subscription}} AS s
    JOIN {{lease}} AS l ON l.subscription = s.name AND l.generation = s.generation AND l.partition = :partition
    WHERE s.name = :subscription
"""
#: The index on due_at finds the heads, that of units what stands behind them; bodies stay out of the window function.
_HEADS = f"""
    WITH h AS (
        SELECT p.id, p.unit, p.place, p.due_at, length(p.body) AS size FROM {{parked}} AS p
        WHERE {_OUT} AND NOT {{paused}} ORDER BY p.due_at, p.id LIMIT :limit)
    SELECT {COLUMNS.format(body="body")}, attempts + 1, CASE WHEN expires_at <= {{now}} THEN 1 ELSE 0 END, error
    FROM (
        SELECT r.its_id, sum(r.size) OVER (ORDER BY r.due, r.head, r.nth) AS cut,
               row_number() OVER (ORDER BY r.due, r.head, r.nth) AS turn
        FROM (SELECT h.id AS its_id, h.due_at AS due, h.id AS head, h.place AS nth, h.size FROM h
              UNION ALL
              SELECT b.id, h.due_at, h.id, b.place, length(b.body) FROM h CROSS JOIN {{parked}} AS b
              WHERE b.subscription = :subscription AND b.unit = h.unit AND b.place > h.place
                AND b.place < h.place + :run) AS r) AS c
    CROSS JOIN {{parked}} WHERE subscription = :subscription AND id = c.its_id
      AND (turn = 1 OR (turn <= :limit AND cut <= :bytes))
    ORDER BY turn
"""
#: Keeps the lease free until the transaction ends.
_FREE = """
    SELECT 1 FROM {lease} WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND epoch = :leased AND lease_until IS NULL {share_lock}
"""
#: A receipt may end, or prolong, the time of a message just before the time is over. Only a head has a state.
_AGAIN = {
    "changes": "state = CASE WHEN state IS NOT NULL THEN 'retry' END, attempts = r.tries, due_at = {due},"
    " error = :receipt",
    "joined": "subscription = :subscription AND id = r.out_id AND coalesce(due_at, {now}) <= {now} AND {id_in_ids}"
    f" AND EXISTS ({_FREE})",
}
_ROWS = {"out_id": "bigint", "tries": "bigint", "seconds": "float"}
#: By primary key.
_OUT_NOW = "SELECT id FROM {parked} WHERE subscription = :subscription AND {id_in_ids} AND error = :receipt"
_STORED = """
    SELECT 1 FROM {progress} WHERE subscription = :subscription AND generation = :generation AND partition = :partition
      AND epoch = :epoch AND n = :n
"""
#: So many bytes of bodies are handed out at once, if not one message alone has more.
MOST_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A partition as a pop finds it. `leased`: the epoch of the lease; `free`: nobody has the lease.

    `decided`, `fell_due`, `due`, `held`: there are open decisions, delayed messages of keys that are due, heads that
    are due, keys that are held.
    """

    subscription: Subscription
    partition: Partition
    leased: int
    free: bool
    settled: Settled
    decided: bool
    fell_due: bool
    due: bool
    held: bool
    incarnation: str
    now: datetime


class Pops:
    """The statements of the pops of one partition, all but `lock` inside the transaction of a pop."""

    def __init__(self, channel: Channel, partition: Partition) -> None:
        self._channel = channel
        self._database = database = channel.database
        self._subscription, self._number = partition.subscription, partition.partition
        slots = slots_of(partition)
        self._common: dict[str, Any] = {"subscription": self._subscription, "partition": self._number, **slots}
        self._of_slots = f"AND p.{OF_SLOTS}" if slots else ""
        own = database.dialect.locks.own_text
        self._lock = None if own is None else database.sql(f"SELECT {own.format(text=':name', seed=_SEED)}")
        self._progress = ProgressLog(channel)

    def lock(self) -> None:
        """Let no other pop of the partition begin until the transaction ends."""
        if self._lock is not None:
            self._channel.rows(self._lock, name=f"{self._subscription} {self._number}")

    def standing(self) -> Standing | None:
        """Return how the partition stands; None: there is no such partition."""
        highest = "highest_id" if self._database.dialect.reads.transaction_ids else "NULL"
        columns = ", ".join(f"s.{each.strip()}" for each in OF_SUBSCRIPTION.split(","))
        parts = {"of_slots": self._of_slots, "unordered": "NOT s.ordered", "highest": highest, "columns": columns}
        statement = self._database.sql(_STANDING, **parts)
        rows = self._channel.rows(statement, **self._common)
        if not rows:
            return None
        *stored, leased, free, base, target, after, at, epoch, n, last, decided, fell, due, held, who, now = rows[0]
        subscription = Subscriptions(self._channel).of(tuple(stored))
        return Standing(
            subscription=subscription,
            partition=subscription.partition(self._number),
            leased=leased,
            free=bool(free),
            settled=self._progress.settled((base, target, after, at, epoch, n, last)),
            decided=bool(decided),
            fell_due=bool(fell),
            due=bool(due),
            held=bool(held),
            incarnation=who,
            now=self._database.moment(now),
        )

    def due(self, most: int, run: int, *, ordered: bool, paused: Collection[str]) -> list[Ready]:
        """Return at most so many messages whose time is over, the keys first that have been due for longest.

        `run`: at most so many of a key. `paused`: keys of which no message is handed out.
        """
        unordered = "FALSE" if ordered else "TRUE"
        among = self._database.among("coalesce(p.key, '')", texts="paused")  # no key is empty
        parts = {"of_slots": self._of_slots, "unordered": unordered, "paused": among}
        statement = self._database.sql(_HEADS, **parts)
        bound: dict[str, Any] = {"paused": self._database.bind(paused)}
        bound |= {"limit": most, "run": min(run, MOST_OF_KEY), "bytes": MOST_BYTES}
        rows = self._channel.rows(statement, **self._common, **bound)
        messages = self._database.dialect.reads.messages([row[:12] for row in rows])
        return [Ready(each, bool(row[12]), row[13]) for each, row in zip(messages, rows, strict=True)]

    def hold(self, standing: Standing) -> bool:
        """Keep the lease free until the transaction ends; return False where somebody has taken the lease."""
        return bool(self._channel.rows(_FREE, **self._common, **_of_lease(standing)))

    def hand_out_again(self, standing: Standing, receipt: str, parkings: Sequence[tuple[Message, Parking]]) -> set[int]:
        """Park messages anew, under a receipt; return the ids of those whose time was still over.

        None is handed out if somebody has taken the lease.
        """
        if not parkings:
            return set()
        database = self._database
        due, ids = database.later("r.seconds"), [message.id or 0 for message, _ in parkings]
        rows = [(each.id, parking.attempts, _seconds(parking)) for each, parking in parkings]
        changes = _AGAIN["changes"].format(due=due)
        joined = _AGAIN["joined"].format(**database.names)
        parts = {"table": database.names["parked"], "source": f"{database.records('rows', **_ROWS)} AS r"}
        update = database.sql(database.dialect.writes.update_from, **parts, changes=changes, joined=joined)
        bound = {**self._common, **_of_lease(standing), **database.bind_records("rows", rows, **_ROWS)}
        bound["ids"] = database.bind(ids)
        written = self._channel.run(update, **bound, receipt=receipt)
        return {*ids} if written == len(ids) else self._out(ids, receipt)

    def settle(
        self,
        standing: Standing,
        end: Progress,
        highest: int | None,
        parked: Parked,
        receipt: str,
        parkings: Sequence[tuple[int, Parking]],
    ) -> set[int]:
        """Append the progress and park messages of the log, in one statement; return at least the ids of those that are
        handed out: a message may be gone from the log.

        Raises:
            LeaseLostError: somebody has the lease; nothing was written.
            DatabaseError: ids were given out again since the last pop, or another message is parked under an id.
        """
        progress = self._progress.pop(standing.partition, standing.settled, standing.leased, end, standing.incarnation)
        first = progress._replace(parameters={**progress.bound, "highest": highest})
        both, written = self._database.dialect.writes.both, 0
        if both is None or not parkings:
            self._require(standing, written=self._channel.run(first.sql, **first.bound) == 1)
            if parkings:
                second = parked.parking(parkings)
                written = self._channel.run(second.sql, **second.bound)
        else:
            second = parked.parking(parkings, "EXISTS (SELECT 1 FROM first)")
            statement = self._database.sql(both, first=first.sql, second=second.sql)
            written = self._channel.run(statement, **{**first.bound, **second.bound})
        ids = [id for id, _ in parkings]
        if written == len(parkings):
            return {*ids}
        self._require(standing, written=bool(self._channel.rows(_STORED, **first.bound)))
        parked.require_same(ids)
        return self._out(ids, receipt)

    def thin(self, standing: Standing) -> None:
        """Delete some of the progress of earlier pops, now and then; called after the commit."""
        self._progress.thin(standing.partition, replace(standing.settled, n=standing.settled.n + 1))

    def _require(self, standing: Standing, *, written: bool) -> None:
        if not written:
            self._progress.require_same_ids(self._subscription)
            raise LeaseLostError(f"{self._subscription}: somebody has taken the lease meanwhile; nothing was settled")

    def _out(self, ids: Sequence[int], receipt: str) -> set[int]:
        rows = self._channel.rows(_OUT_NOW, **self._common, ids=self._database.bind(ids), receipt=receipt)
        return {id for (id,) in rows}


def _of_lease(standing: Standing) -> dict[str, object]:
    return {"generation": standing.subscription.generation, "leased": standing.leased}


def _seconds(parking: Parking) -> float:
    return 0.0 if parking.delay is None else parking.delay.total_seconds()
