"""Half messages: rows of the log under a topic of their own, each with a message that a transaction will send."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from outbox.model.limits import HALF_TOPIC
from outbox.model.message import TRANSACTION_ID, Message, stored_message
from outbox.model.slots import slot_of
from outbox.store.database import Database
from outbox.store.dialects.statements import Script, Statement
from outbox.store.fronts.topics import topic_lock

#: How a checker finds out what became of a transaction: from an op row that its business transaction writes (join),
#: from a record in another database, or by asking a listener.
Way = Literal["join", "record", "listener"]

# Headers of a half message. RocketMQ's names where it has them.
REAL_TOPIC, REAL_QUEUE = "REAL_TOPIC", "REAL_QID"
PRODUCER_GROUP = "PGROUP"
CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
_MARK, _MESSAGE_ID = "TRAN_MSG", "UNIQ_KEY"
#: The topic under which RocketMQ shows half messages that it has given up. Here nothing is appended to it.
GIVEN_UP_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
_TAGS, _KEY = "TAGS", "__SHARDINGKEY"
_DELIVER_AT, _DELAY = "TIMER_DELIVER_MS", "TIMER_DELAY_MS"
_EXPIRES_AT = "outbox-expires-ms"
#: The headers that the restored message will have, in the form in which they will be stored.
_HEADERS = "outbox-headers"
WAY = "outbox-verdict"
RECORDED_IN = "outbox-recorded-in"

#: Inserts nothing after the verdict, because nobody would restore the message then.
_INSERT = f"""
    INSERT INTO {{message}} (message_id, topic, key, slot, tags, headers, body, content_type, created_at)
    SELECT :message_id, '{HALF_TOPIC}', CAST(:transaction AS {{text}}), :slot, CAST(:producer_group AS {{text}}),
           CAST(:headers AS {{text}}), :body, CAST(:content_type AS {{text}}), {{now}}
    WHERE NOT EXISTS (SELECT 1 FROM {{op}} WHERE transaction_id = CAST(:transaction AS {{text}}))
"""
#: Inserts nothing beside another half message of the transaction either, and nothing without the front's topic.
_INSERT_ONLY = f"""
    {_INSERT} AND NOT EXISTS (
        SELECT 1 FROM {{message}} WHERE topic = '{HALF_TOPIC}' AND key = CAST(:transaction AS {{text}}))
    AND EXISTS (SELECT 1 FROM {{topic}} WHERE name = CAST(:producer_group AS {{text}}) AND type = 'TRANSACTION')
"""
_INSERTED = f"""
    SELECT max(id) FROM {{message}}
    WHERE topic = '{HALF_TOPIC}' AND key = :transaction AND message_id = :message_id
"""
#: The lock that keeps the sends and the verdict of a transaction apart: sends share it, the verdict has it alone. A
#: statement sees nothing that is committed after its own beginning. So each side takes the lock in a statement before
#: the one that looks for what the other side has written. A verdict writes its own row before it takes the lock: others
#: may wait for that row until a business transaction ends, and hold no lock meanwhile.
_LOCKED = {"text": ":transaction", "seed": zlib.crc32(b"half messages and verdicts")}

_MILLISECOND = timedelta(milliseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: The columns of a restored message, each with the header that holds it, and with its type: text, number, moment (in
#: milliseconds since 1970) or delay (in milliseconds, from the restoring on).
RESTORED: Mapping[str, tuple[str, str]] = {
    "topic": (REAL_TOPIC, "text"),
    "key": (_KEY, "text"),
    "slot": (REAL_QUEUE, "number"),
    "tags": (_TAGS, "text"),
    "headers": (_HEADERS, "text"),
    "deliver_at": (_DELIVER_AT, "moment"),
    "delay": (_DELAY, "delay"),
    "expires_at": (_EXPIRES_AT, "moment"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """The facts about a transaction that each of its half messages carries.

    `immunity`: for how long no producer is asked; None: the group's default. `recorded_in`: the business database, for
    `way` "record"; None where a database has no identity, as a file of SQLite.
    """

    transaction: str
    group: str
    way: Way
    immunity: timedelta | None = None
    recorded_in: str | None = None

    def headers_of(self, message: Message, slot: int, restored: str) -> str:
        """Return the headers of a message's half row; `restored`: the headers of the message itself, as JSON."""
        headers = {
            _MARK: "true",
            PRODUCER_GROUP: self.group,
            TRANSACTION_ID: self.transaction,
            _MESSAGE_ID: str(message.message_id),
            REAL_TOPIC: message.topic,
            REAL_QUEUE: str(slot),
            WAY: self.way,
            _HEADERS: restored,
        }
        if self.immunity is not None:
            headers[IMMUNITY] = str(self.immunity // timedelta(seconds=1))
        if self.recorded_in is not None:
            headers[RECORDED_IN] = self.recorded_in
        if message.tags is not None:
            headers[_TAGS] = message.tags
        if message.key is not None:
            headers[_KEY] = message.key
        if message.deliver_at is not None:
            headers[_DELIVER_AT] = str(_milliseconds(message.deliver_at - _EPOCH))
        if message.delay is not None:
            headers[_DELAY] = str(_milliseconds(message.delay))
        if message.expires_at is not None:
            headers[_EXPIRES_AT] = str(_milliseconds(message.expires_at - _EPOCH))
        return json.dumps(headers, ensure_ascii=False, separators=(",", ":"))


class Halves:
    """Appends half messages to the log of one outbox."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._insert = database.telling(_INSERT, "id", _INSERTED)
        self._insert_only = database.telling(_INSERT_ONLY, "id", _INSERTED)
        self._inserted = database.sql(_INSERTED)
        locks = database.dialect.locks
        share, own = lock_by(locks.share_text), lock_by(locks.own_text)
        self._share = None if share is None else database.sql(f"SELECT {share}")
        topic = topic_lock(locks.share_text, "producer_group")
        self._own = None if own is None else database.sql(f"SELECT {topic}, {own}")

    def append(
        self, half: Half, message: Message, slot: int, headers: str, *, only: bool = False
    ) -> Script[int | None]:
        """Append a half message and return the log id; None: the transaction has a verdict already.

        `slot` and `headers`: of the later message. `only`: None also if the transaction has a half message already, or
        if its group is no topic of transactions, as at a front.
        """
        bound = {
            "message_id": self._database.dialect.values.bind_uuid(message.message_id),
            "transaction": half.transaction,
            "slot": slot_of(half.transaction, self._database.slots),
            "producer_group": half.group,
            "headers": half.headers_of(message, slot, headers),
            "body": message.body,
            "content_type": message.content_type,
        }
        # Two sends that share the lock do not see each other's rows.
        lock = self._own if only else self._share
        if lock is not None:
            yield Statement(lock, bound)
        rows = yield from (self._insert_only if only else self._insert)(bound)
        return rows[0][0] if rows else None

    def has(self, half: Half, message: Message) -> Script[bool]:
        """Return whether the transaction has a half message with this message."""
        id = self._database.dialect.values.bind_uuid(message.message_id)
        bound = {"transaction": half.transaction, "message_id": id}
        rows = yield Statement(self._inserted, bound, returns=True)
        return rows[0][0] is not None


def lock_by(template: str | None) -> str | None:
    """Return the SQL that takes the lock on `:transaction`; None where only one transaction can write."""
    return None if template is None else template.format(**_LOCKED)


def real_topic_of(database: Database, headers: str = "headers") -> str:
    """Return the SQL of the real topic of a half row; empty for one that no producer wrote."""
    return f"coalesce({database.header(headers, REAL_TOPIC)}, '')"


def half_of(row: Message) -> Half:
    """Return the facts about the transaction of a half row."""
    headers = row.headers
    immunity = headers.get(IMMUNITY)
    way: Way = headers[WAY]  # type: ignore[assignment]  # written by us
    return Half(
        transaction=headers[TRANSACTION_ID],
        group=headers[PRODUCER_GROUP],
        way=way,
        immunity=None if immunity is None else timedelta(seconds=int(immunity)),
        recorded_in=headers.get(RECORDED_IN),
    )


def is_readable(row: Message) -> bool:
    """Return whether a half row carries a message, as a producer writes it."""
    return {REAL_TOPIC, _HEADERS} <= row.headers.keys()


def real_message(row: Message) -> Message:
    """Return the message in a half row, with a header for how often the transaction was asked about."""
    headers = row.headers
    restored = {**json.loads(headers[_HEADERS]), CHECK_TIMES: str(row.attempt)}
    return stored_message(
        (
            row.id or 0,
            row.message_id,
            headers[REAL_TOPIC],
            headers.get(_KEY),
            headers.get(_TAGS),
            json.dumps(restored, ensure_ascii=False, separators=(",", ":")),
            row.body,
            row.content_type,
            row.created_at or _EPOCH,
            _moment(headers.get(_DELIVER_AT)),
            _moment(headers.get(_EXPIRES_AT)),
            row.attempt,
        )
    )


def delay_of(row: Message) -> timedelta | None:
    """Return the delay, counted from the commit, of the message in a half row; None: no delay."""
    milliseconds = row.headers.get(_DELAY)
    return None if milliseconds is None else int(milliseconds) * _MILLISECOND


def _moment(milliseconds: str | None) -> datetime | None:
    return None if milliseconds is None else _EPOCH + int(milliseconds) * _MILLISECOND


def _milliseconds(time: timedelta) -> int:
    """Return whole milliseconds, rounded up, so that nothing comes too early."""
    return -(-time // _MILLISECOND)
