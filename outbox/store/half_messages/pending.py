"""Pending transactions, for people: since when, and how often the producers were asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message
from outbox.model.parking import States
from outbox.model.subscription import Subscription, check_of
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS, READ_COLUMNS
from outbox.store.dialects.statements import Row
from outbox.store.half_messages.half import GIVEN_UP_TOPIC, IMMUNITY, WAY, Way, real_topic_of
from outbox.store.subscriptions.subscriptions import Subscriptions

#: The oldest transactions without a verdict. The partial index of half messages returns them in the order of the
#: transactions' ids, and the ops are read in the same order. So half messages are read from the oldest on, until enough
#: transactions are found.
_PENDING = f"""
    SELECT m.key FROM {{message}} AS m
    WHERE m.topic = '{HALF_TOPIC}' AND m.key IS NOT NULL AND m.key > :after AND {{of_group}}
      AND NOT EXISTS (SELECT 1 FROM {{op}} AS o WHERE o.transaction_id = m.key)
    GROUP BY m.key ORDER BY m.key LIMIT :limit
"""
#: Transactions without a verdict that were given up, by (subscription, state, id).
_GIVEN_UP = """
    SELECT p.key FROM {parked} AS p
    WHERE {of_groups} AND p.state = 'dead' AND p.key > :after
      AND NOT EXISTS (SELECT 1 FROM {op} AS o WHERE o.transaction_id = p.key)
    GROUP BY p.key ORDER BY p.key LIMIT :limit
"""
#: The half messages of these transactions, by the partial index on their key.
_MESSAGES = f"""
    SELECT m.key, coalesce(m.tags, ''), {{real_topic}}, {{way}}, count(*), min(m.created_at), {{age}}, max({{immunity}})
    FROM {{message}} AS m WHERE m.topic = '{HALF_TOPIC}' AND {{chosen}}
    GROUP BY m.key, coalesce(m.tags, ''), {{real_topic}}, {{way}} ORDER BY min(m.id)
"""
#: The half messages that their checks have parked, by primary key, without those behind another one of their
#: transaction.
_PARKED = f"""
    SELECT m.key, p.id, p.state, p.attempts, p.error, p.due_at
    FROM {{message}} AS m JOIN {{parked}} AS p ON p.subscription = :prefix || m.tags AND p.id = m.id
    WHERE m.topic = '{HALF_TOPIC}' AND {{chosen}} AND p.state IS NOT NULL ORDER BY p.id
"""
_OPS = "SELECT transaction_id, op, decided_by, decided_at FROM {op} WHERE {chosen}"
_ROWS = f"""
    SELECT {READ_COLUMNS} FROM {{message}}
    WHERE topic = '{HALF_TOPIC}' AND key = :transaction ORDER BY id
"""
#: The same rows with the size of each body in place of the body, by the same index.
_SIZES = _ROWS.replace(READ_COLUMNS, COLUMNS.format(body="length(body)"))
_BODY = COLUMNS.split(", ").index("{body}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A verdict that stands: `op` is commit or rollback."""

    op: str
    decided_by: str
    decided_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfTransaction:
    """A transaction with half messages. `real_topics` and `verdict` are empty if no producer wrote them.

    `age`: seconds since the first half message was stored. `checks`: how often producers were asked. `last_answer`: the
    result of the last check; None: no check yet. `next_check_at`: the moment of the next check; None: no check without
    a person. `given_up`: a person has to decide; `given_up_ids` are the log ids of the dead half messages.
    """

    transaction_id: str
    group: str
    real_topics: tuple[str, ...]
    verdict: Way
    messages: int
    created_at: datetime
    age: float
    checks: int
    last_answer: str | None
    next_check_at: datetime | None
    given_up_ids: tuple[int, ...]

    @property
    def given_up(self) -> bool:
        """True if its producers are not asked about it any more."""
        return bool(self.given_up_ids)

    @property
    def topic(self) -> str:
        """The topic under which RocketMQ would show it."""
        return GIVEN_UP_TOPIC if self.given_up else HALF_TOPIC


class HalfTransactions:
    """The transactions of one outbox that have half messages."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._database = channel.database

    def pending(
        self, *, group: str | None = None, given_up: bool = False, limit: int, after: str | None = None
    ) -> list[HalfTransaction]:
        """Return at most `limit` transactions without a verdict, the oldest first, in the order of their ids.

        `group`: only this producer group. `given_up`: only transactions for a person. `after`: the id of the last
        transaction of the page before.
        """
        page = {"after": after or "", "limit": limit}
        if given_up:
            checks = [each.name for each in self._checks() if group is None or each.name == check_of(group)]
            statement = self._database.sql(
                _GIVEN_UP, of_groups=self._database.among("p.subscription", texts="subscriptions")
            )
            keys = self._channel.rows(statement, subscriptions=self._database.bind(checks), **page)
        else:
            statement = self._database.sql(_PENDING, of_group="TRUE" if group is None else "m.tags = :producer_group")
            keys = self._channel.rows(statement, producer_group=group, **page)
        found = self._of([key for (key,) in keys])
        return [found[key] for (key,) in keys if key in found]

    def find(self, transaction: str) -> tuple[HalfTransaction | None, Decided | None]:
        """Return a transaction, and the verdict that stands; None for a missing one."""
        return self._of([transaction]).get(transaction), self._decided(transaction)

    def messages(self, transaction: str) -> list[Message]:
        """Return the half messages of a transaction as stored, in their order."""
        return self._database.dialect.reads.messages(self._channel.rows(_ROWS, transaction=transaction))

    def sizes(self, transaction: str) -> list[tuple[Message, int]]:
        """Return the half messages of a transaction without bodies, each with the number of bytes of its body."""
        rows = self._channel.rows(_SIZES, transaction=transaction)
        bare = [(*row[:_BODY], b"", *row[_BODY + 1 :]) for row in rows]
        return list(zip(self._database.dialect.reads.messages(bare), [row[_BODY] for row in rows], strict=True))

    def _decided(self, transaction: str) -> Decided | None:
        chosen = self._database.among("transaction_id", texts="transactions")
        rows = self._channel.rows(self._database.sql(_OPS, chosen=chosen), **self._bound([transaction]))
        if not rows:
            return None
        _, op, decided_by, decided_at = rows[0]
        return Decided(op=op, decided_by=decided_by, decided_at=self._database.moment(decided_at))

    def _of(self, transactions: Sequence[str]) -> dict[str, HalfTransaction]:
        """Return these transactions by id; transactions without half messages are left out."""
        database = self._database
        chosen = database.among("m.key", texts="transactions")
        messages = database.sql(
            _MESSAGES,
            chosen=chosen,
            real_topic=real_topic_of(database, "m.headers"),
            way=f"coalesce({database.header('m.headers', WAY)}, '')",
            age=database.seconds(since="min(m.created_at)"),
            immunity=f"CAST({database.header('m.headers', IMMUNITY)} AS {database.dialect.values.types['bigint']})",
        )
        bound = self._bound(transactions)
        rows, parked = defaultdict[str, list[Row]](list), defaultdict[str, list[Row]](list)
        for row in self._channel.rows(messages, **bound):
            rows[row[0]].append(row)
        for row in self._channel.rows(database.sql(_PARKED, chosen=chosen), **bound, prefix=check_of("")):
            parked[row[0]].append(row)
        checks = {each.name: each for each in self._checks()}
        return {key: self._made(found, parked[key], checks) for key, found in rows.items()}

    def _made(self, rows: list[Row], parked: list[Row], checks: dict[str, Subscription]) -> HalfTransaction:
        key, group, _, way, _, created_at, _, _ = rows[0]
        created = self._database.moment(created_at)
        check = checks.get(check_of(group))
        dead = tuple(id for _, id, state, _, _, _ in parked if state == States.DEAD)
        due = [self._database.moment(due_at) for *_, due_at in parked if due_at is not None]
        if not parked and check is not None:
            asked_for = timedelta(seconds=max(immunity or 0 for *_, immunity in rows))
            due = [created + max(check.grace, asked_for)]
        said = max(parked, key=lambda row: (row[2] == States.DEAD, row[3]), default=None)
        return HalfTransaction(
            transaction_id=key,
            group=group,
            real_topics=tuple(dict.fromkeys(row[2] for row in rows if row[2])),
            verdict=way,
            messages=sum(row[4] for row in rows),
            created_at=min(self._database.moment(row[5]) for row in rows),
            age=max(0.0, *(row[6] for row in rows)),
            checks=0 if said is None else said[3],
            last_answer=None if said is None else said[4],
            next_check_at=None if dead else min(due, default=None),
            given_up_ids=dead,
        )

    def _checks(self) -> list[Subscription]:
        return [each for each in Subscriptions(self._channel).all() if each.kind == "check"]

    def _bound(self, transactions: Sequence[str]) -> dict[str, object]:
        return {"transactions": self._database.bind(transactions)}
