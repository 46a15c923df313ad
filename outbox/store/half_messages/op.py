"""Ops: the write-once verdicts on transactions. A commit also appends the messages of the half messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal
from uuid import UUID

from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message
from outbox.runtime.failpoints import crash_point
from outbox.store.database import Channel, Database
from outbox.store.dialects.statements import Row, Script, Statement
from outbox.store.half_messages.half import CHECK_TIMES, IMMUNITY, RECORDED_IN, RESTORED, WAY, Way, lock_by

Op = Literal["commit", "rollback"]

#: By the partial index on the key of half messages; the topic is no parameter, so that the planner knows it.
_HALVES = f"topic = '{HALF_TOPIC}' AND key = :transaction"
_OF_GROUP = f"{_HALVES} AND (CAST(:producer_group AS {{text}}) IS NULL OR tags = CAST(:producer_group AS {{text}}))"
_KNOWN = f"EXISTS (SELECT 1 FROM {{message}} WHERE {_OF_GROUP})"

#: The first insert wins.
_DECIDE = """
    {insert_once} {op} (transaction_id, op, decided_by, decided_at)
    SELECT CAST(:transaction AS {text}), CAST(:op AS {text}), CAST(:decided_by AS {text}), {now} WHERE {known}
    {unless_there}
"""
#: A message that two half messages hold is restored once.
_RESTORE = f"""
    INSERT INTO {{message}} (message_id, topic, key, slot, tags, headers, body, content_type, created_at, deliver_at,
                             expires_at)
    SELECT message_id, {{real_topic}}, {{key}}, {{slot}}, {{tags}}, {{headers}}, body, content_type, {{now}},
           {{deliver_at}}, {{expires_at}}
    FROM {{message}}
    WHERE {_HALVES} AND {{decided}}
      AND id IN (SELECT min(id) FROM {{message}} WHERE {_HALVES} GROUP BY message_id)
    ORDER BY id
"""
#: The headers of a restored message; with the number of questions, if the verdict is the answer to one.
_HEADERS = f"""
    CASE WHEN CAST(:asked AS {{text}}) IS NULL OR {{headers}} = '{{{{}}}}' THEN {{headers}}
         ELSE substr({{headers}}, 1, length({{headers}}) - 1) || ',"{CHECK_TIMES}":"' || CAST(:asked AS {{text}})
              || '"}}}}'
    END
"""
_MESSAGE_ID = "CAST(message_id AS {text})"
_RESTORED = f"SELECT DISTINCT {_MESSAGE_ID} FROM {{message}} WHERE {_HALVES}"
_IS_COMMIT = "EXISTS (SELECT 1 FROM {op} WHERE transaction_id = :transaction AND op = 'commit'{by_this_one})"
#: How `decided_by` begins between a join and the restoring, which takes the mark away in the same transaction. So an op
#: that is committed with the mark was committed by a COMMIT that nobody saw, and its messages were not appended.
_UNRESTORED = "a join that has delivered nothing yet, of "
#: Whether an op has the mark.
IS_UNRESTORED = f"substr(decided_by, 1, {len(_UNRESTORED)}) = '{_UNRESTORED}'"
#: Only one transaction gets a row from this, also if it waits for another one: that one is to append the messages.
_CLAIM = f"""
    UPDATE {{op}} SET decided_by = substr(decided_by, {len(_UNRESTORED) + 1})
    WHERE transaction_id = CAST(:transaction AS {{text}}) AND op = 'commit' AND {IS_UNRESTORED}
"""
#: A statement of its own: the snapshot of the one before may be older than the row that it met.
_STANDING = f"""
    SELECT (SELECT op FROM {{op}} WHERE transaction_id = :transaction),
           (SELECT min(tags) FROM {{message}} WHERE {_HALVES}),
           (SELECT min({{way}}) FROM {{message}} WHERE {_HALVES}),
           (SELECT min({{recorded_in}}) FROM {{message}} WHERE {_HALVES}),
           (SELECT decided_by FROM {{op}} WHERE transaction_id = :transaction)
"""
_AMONG = f"SELECT transaction_id FROM {{op}} WHERE {{chosen}} AND NOT {IS_UNRESTORED}"
_DEAD = f"""
    SELECT p.id, p.key FROM {{parked}} AS p JOIN {{op}} AS o ON o.transaction_id = p.key
    WHERE p.subscription = :subscription AND p.state = 'dead' AND NOT {IS_UNRESTORED} ORDER BY p.id LIMIT :limit
"""
#: A scalar sub-select, because a join may be answered by reading all verdicts.
_PENDING = f"""
    SELECT m.key, {{age}}, {{immunity}}, (SELECT CASE WHEN {IS_UNRESTORED} THEN 'unrestored' ELSE o.op END
                                      FROM {{op}} AS o WHERE o.transaction_id = m.key)
    FROM {{message}} AS m WHERE m.topic = '{HALF_TOPIC}' AND {{chosen}} ORDER BY m.id
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of a verdict on a transaction.

    `op`: the verdict that stands; None: the transaction is not known. `first`: this call wrote the verdict, and
    `restored` has the ids of the messages that were appended. `group`, `way` and `recorded_in` (of the half messages)
    and `by` (who decided) are set only where the verdict was read back. `outermost`: the verdict was certainly written
    outside of every savepoint. `unrestored`: a commit whose messages were not appended.
    """

    op: Op | None
    first: bool
    restored: frozenset[UUID] = frozenset()
    group: str | None = None
    way: Way | None = None
    recorded_in: str | None = None
    by: str | None = None
    outermost: bool = True
    unrestored: bool = False


@dataclass(slots=True)
class Pending:
    """A transaction at one moment: `age` since the first half message was stored, and the op.

    `unrestored`: the op is commit, and no message was appended. `immune_for`: the time until all messages may be asked
    about; zero or less: now.
    """

    age: timedelta
    immune_for: timedelta
    op: Op | None
    unrestored: bool = False


class Ops:
    """The verdicts of one outbox."""

    def __init__(self, database: Database) -> None:
        dialect, writes = database.dialect, database.dialect.writes
        headers = {column: database.header("headers", name) for column, (name, _) in RESTORED.items()}
        deliver_at = dialect.clock.from_milliseconds.format(value=headers["deliver_at"])
        types = dialect.values.types
        delayed = database.later(f"CAST({headers['delay']} AS {types['bigint']}) / 1000.0")
        columns = {
            **{name: each for name, each in headers.items() if name != "topic"},
            "real_topic": headers["topic"],
            "headers": _HEADERS.format(headers=headers["headers"], text=types["text"]),
            "slot": f"CAST({headers['slot']} AS {types['smallint']})",
            "expires_at": dialect.clock.from_milliseconds.format(value=headers["expires_at"]),
            "deliver_at": f"coalesce({deliver_at}, {delayed})",
        }
        known, outermost = database.sql(_KNOWN), writes.outermost or "TRUE"
        lock = lock_by(dialect.locks.own_text)
        self._locks = lock is not None
        # Of the row that was written; so the lock is taken after it.
        told = outermost if lock is None else f"{outermost}, {lock}"
        self._tells_outermost = writes.returning is not None and writes.outermost is not None
        self._decide = database.telling(_DECIDE, told, known=known)
        self._join = database.telling(_DECIDE, outermost, known="TRUE")
        self._claim = database.telling(_CLAIM, "transaction_id" if lock is None else lock)
        ids, restored = database.sql(_MESSAGE_ID), database.sql(_RESTORED)
        self._restore = database.telling(
            _RESTORE, ids, restored, decided=database.sql(_IS_COMMIT, by_this_one=""), **columns
        )
        own = database.sql(_IS_COMMIT, by_this_one=f" AND {outermost}")
        self._restore_own = database.telling(_RESTORE, ids, restored, decided=own, **columns)
        self._standing = database.sql(
            _STANDING, way=database.header("headers", WAY), recorded_in=database.header("headers", RECORDED_IN)
        )

    def commit(
        self, transaction: str, *, by: str, group: str | None = None, asked: int | None = None
    ) -> Script[Decision]:
        """Write the commit and append the messages, both or neither. Call it inside a transaction.

        `asked`: how often a producer was asked, if the commit is the answer; the messages say so.
        """
        bound = self._bound(transaction, "commit", by, group, asked)
        decided = yield from self._decide(bound)
        if not decided:
            return (yield from self.standing(transaction))
        crash_point("half.before_restore")
        rows = yield from self._restore(bound)
        return Decision(op="commit", first=True, restored=_ids(rows), outermost=self._outermost(decided))

    def commit_alone(
        self, transaction: str, *, by: str, group: str | None = None, asked: int | None = None
    ) -> Script[Decision]:
        """Do as `commit`, in a transaction without other writes and without a savepoint.

        One round trip on a connection of our own that commits every statement.
        """
        if not self._tells_outermost:
            return (yield from self.commit(transaction, by=by, group=group, asked=asked))
        bound = self._bound(transaction, "commit", by, group, asked)
        yield Statement(self._decide.write, bound)
        rows = yield from self._restore_own(bound)
        if rows:
            return Decision(op="commit", first=True, restored=_ids(rows))
        return (yield from self.standing(transaction))

    def roll_back(self, transaction: str, *, by: str, group: str | None = None) -> Script[Decision]:
        """Write the rollback, unless a verdict stands already."""
        bound = self._bound(transaction, "rollback", by, group)
        if (yield from self._decide(bound)):
            return Decision(op="rollback", first=True)
        return (yield from self.standing(transaction))

    def join(self, transaction: str, *, by: str) -> Script[Decision]:
        """Write the commit at the beginning of a business transaction; call `restore` at its end.

        Messages may be sent in between, so no lock is taken yet.
        """
        bound = self._bound(transaction, "commit", f"{_UNRESTORED}{by}", None)
        decided = yield from self._join(bound)
        if decided:
            return Decision(op="commit", first=True, outermost=self._outermost(decided))
        return (yield from self.standing(transaction))

    def restore(self, transaction: str) -> Script[frozenset[UUID] | None]:
        """Append the messages of a transaction that was joined, and return their ids.

        None: no join, or the messages were appended before.
        """
        crash_point("half.before_restore")
        bound: dict[str, object] = {"transaction": transaction, "asked": None}
        if self._locks:
            return (yield from self._claim_and_restore(bound))
        # On SQLite no transaction runs after a COMMIT that nobody saw, and every statement would be committed alone.
        yield Statement("SAVEPOINT outbox_restore")
        restored = yield from self._claim_and_restore(bound)
        yield Statement("RELEASE outbox_restore")
        return restored

    def _claim_and_restore(self, bound: dict[str, object]) -> Script[frozenset[UUID] | None]:
        if not (yield from self._claim(bound)):
            return None
        return _ids((yield from self._restore(bound)))

    def _outermost(self, decided: Sequence[Row]) -> bool:
        return self._tells_outermost and bool(decided[0][0])

    def standing(self, transaction: str) -> Script[Decision]:
        """Read which verdict stands."""
        rows = yield Statement(self._standing, {"transaction": transaction}, returns=True)
        op, group, way, recorded_in, by = rows[0]
        unrestored = by is not None and by.startswith(_UNRESTORED)
        by = by.removeprefix(_UNRESTORED) if unrestored else by
        return Decision(op=op, first=False, group=group, way=way, recorded_in=recorded_in, by=by, unrestored=unrestored)

    def _bound(
        self, transaction: str, op: Op, by: str, group: str | None, asked: int | None = None
    ) -> dict[str, object]:
        times = None if asked is None else str(asked)
        return {"transaction": transaction, "op": op, "decided_by": by, "producer_group": group, "asked": times}


def _ids(rows: Sequence[Row]) -> frozenset[UUID]:
    return frozenset(UUID(row[0]) for row in rows)


class DecidedHalves:
    """Tells a worker and a checker which transactions have a verdict."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._database = channel.database

    def finished(self, messages: Sequence[Message]) -> set[int]:
        """Return the log ids of half messages whose transaction has a verdict, and nothing left to restore."""
        statement = self._database.sql(_AMONG, chosen=self._database.among("transaction_id", texts="transactions"))
        transactions = self._database.bind({message.key for message in messages})
        decided = {row[0] for row in self._channel.rows(statement, transactions=transactions)}
        return {message.id or 0 for message in messages if message.key in decided}

    def dead(self, subscription: str, limit: int) -> list[tuple[int, str | None]]:
        """Return log id and key of dead half messages whose transaction has received a verdict since."""
        return [(id, key) for id, key in self._channel.rows(_DEAD, subscription=subscription, limit=limit)]

    def pending(self, transactions: Iterable[str], immunity: timedelta) -> dict[str, Pending]:
        """Read how transactions stand, by the database's clock; transactions without half messages are left out.

        `immunity`: the least immunity of a message, also of a message that asks for less.
        """
        statement = self._database.sql(
            _PENDING,
            age=self._database.seconds(since="m.created_at"),
            immunity=self._database.header("m.headers", IMMUNITY),
            chosen=self._database.among("m.key", texts="transactions"),
        )
        found: dict[str, Pending] = {}
        for key, age, asked, op in self._channel.rows(statement, transactions=self._database.bind(transactions)):
            old = timedelta(seconds=age)
            immune_for = max(immunity, timedelta(seconds=int(asked or 0))) - old
            unrestored = op == "unrestored"
            pending = Pending(age=old, immune_for=immune_for, op="commit" if unrestored else op, unrestored=unrestored)
            known = found.setdefault(key, pending)
            known.age, known.immune_for = max(known.age, old), max(known.immune_for, immune_for)
        return found
