"""The log of an outbox in another PostgreSQL database: the SQL that writes to it, and the row that a message becomes.

A sender may not use `store/`: that room serves the outbox that this process reads, by an engine and a dialect, and one
statement after the other. Here one round trip has to do. Both keep to the same two rules, which are on a lower floor:
the version of the tables (`outbox.schema`), and the slot of a key (`outbox.model.slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from outbox.errors import InvalidMessageError
from outbox.model.command import Commands
from outbox.model.encoding import encode_body
from outbox.model.limits import (
    checked_content_type,
    checked_key,
    checked_tags,
    checked_time,
    checked_topic,
    stored_headers,
)
from outbox.model.message import Message
from outbox.model.slots import slot_of
from outbox.schema import PREFIX, VERSION
from outbox.senders.headers import own_headers

_FIX = "send the message anew without that, and discard this one"
#: PostgreSQL cuts longer names, and so does the LISTEN of the relays there.
_LONGEST_NAME = 63

#: The settings of a role or a database are not ours to trust, and those of a session not ours to change: behind a
#: pooler other clients use it, too.
BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE"
COMMIT = b"COMMIT"
#: In milliseconds. A commit that does not wait for the disk could be lost after its message was `Done`.
LIMITS = b"""
    SELECT set_config('statement_timeout', %(statement)s, true), set_config('lock_timeout', %(lock)s, true),
           CASE WHEN current_setting('synchronous_commit') = 'off'
                THEN set_config('synchronous_commit', 'on', true) END
"""

#: A copied database has the identity of the one that it was copied from, until `outbox restore` has been run there.
_LOOK = """
    SELECT version, slots,
           system_identifier IS DISTINCT FROM (SELECT system_identifier::text FROM pg_control_system())
           OR database_oid IS DISTINCT FROM
              (SELECT oid::bigint FROM pg_database WHERE datname = current_database()) AS is_copy
    FROM {meta}
"""

#: Ids that are remembered already insert nothing. They are inserted in their order, so that two calls with the same
#: messages cannot wait for each other. The rows of the log draw their ids in the order of the call. `RETURNING 1`
#: needs no right to read the log.
_STORE = """
    WITH fresh AS (
        INSERT INTO {inbox} (consumer, message_id, handled_at, expires_at)
        SELECT CAST(%(consumer)s AS text), id, statement_timestamp(), statement_timestamp() + interval '168 hours'
        FROM unnest(%(message_id)b::uuid[]) AS given(id) ORDER BY id
        ON CONFLICT (consumer, message_id) DO NOTHING
        RETURNING message_id
    ), stored AS (
        INSERT INTO {message}
            (message_id, topic, key, slot, tags, headers, content_type, body, created_at, deliver_at, expires_at)
        SELECT message_id, topic, key, slot, tags, headers, content_type, body,
               coalesce(created_at, statement_timestamp()), deliver_at, expires_at
        FROM unnest(
                %(message_id)b::uuid[], %(topic)b::text[], %(key)b::text[], %(slot)b::smallint[], %(tags)b::text[],
                %(headers)b::text[], %(content_type)b::text[], %(body)b::bytea[], %(created_at)b::timestamptz[],
                %(deliver_at)b::timestamptz[], %(expires_at)b::timestamptz[]) WITH ORDINALITY
             AS given(message_id, topic, key, slot, tags, headers, content_type, body, created_at, deliver_at,
                      expires_at, place)
        JOIN fresh USING (message_id)
        ORDER BY place
        RETURNING 1
    )
    SELECT CASE WHEN count(*) > 0 THEN CAST(pg_notify(%(hint)s, '') AS text) END FROM stored
"""


class NotReadyError(Exception):
    """The other database cannot take messages as it is; the text says what to do there."""


class Row(NamedTuple):
    """The columns of a message, as the log there has them; it draws the others itself."""

    message_id: UUID
    topic: str
    key: str | None
    slot: int
    tags: str | None
    headers: str | None
    content_type: str | None
    body: bytes
    created_at: datetime | None
    deliver_at: datetime | None
    expires_at: datetime | None


class ForeignLog:
    """The tables of an outbox elsewhere.

    `look` and `store` are statements without and with parameters. `schema`: None is the first of the search path there.
    `consumer`: the name under which its inbox remembers the ids.
    """

    def __init__(self, *, schema: str | None, consumer: str) -> None:
        prefix = f'"{schema}".{PREFIX}' if schema else PREFIX
        names = {name: f"{prefix}{name}" for name in ("message", "inbox", "meta")}
        self.look = _LOOK.format(**names).encode()
        self.store = _STORE.format(**names).encode()
        self._commands = Commands(schema=schema)
        self._upgrade = self._commands.line("db", "upgrade")
        self._where = f" in schema {schema}" if schema else ""
        # Relays with such a schema listen to such a name.
        hint = f"{PREFIX}{schema}" if schema and schema != "public" else PREFIX.rstrip("_")
        self._constant = {"consumer": consumer, "hint": hint[:_LONGEST_NAME]}

    def parameters(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the parameters of `store`: an array for each column, or null for one that is empty in all rows."""
        columns: dict[str, Any] = dict(self._constant)
        for name, column in zip(Row._fields, zip(*rows, strict=True), strict=True):
            columns[name] = None if column.count(None) == len(column) else list(column)
        return columns

    def checked_slots(self, found: Sequence[Any] | None) -> int:
        """Return the number of slots there, from the row of `look`; raise `NotReadyError` if the tables do not fit."""
        if found is None:
            raise NotReadyError(f"outbox_meta is empty{self._where}; run there: {self._upgrade}")
        version, slots, is_copy = found
        if version != VERSION:
            fix = f"run there: {self._upgrade}" if version < VERSION else "install a newer outbox-log here"
            raise NotReadyError(f"the outbox tables{self._where} are of version {version}, this is {VERSION}; {fix}")
        if is_copy:
            raise NotReadyError(f"the database is a copy of another one; run there: {self._commands.line('restore')}")
        return int(slots)

    def missing(self) -> NotReadyError:
        """Return the error for a database without the tables."""
        return NotReadyError(f"the outbox tables are not there{self._where}; run there: {self._upgrade}")


def row_of(message: Message, slots: int) -> Row:
    """Return the row of a message; raise `InvalidMessageError` for a message that no outbox would have written."""
    try:
        return Row(
            message_id=_id_of(message),
            topic=checked_topic(message.topic),
            key=None if message.key is None else checked_key(message.key),
            slot=slot_of(message.key, slots),
            tags=None if message.tags is None else checked_tags(message.tags),
            headers=_headers_of(message),
            content_type=None if message.content_type is None else checked_content_type(message.content_type),
            body=_body_of(message),
            created_at=_moment("created_at", _created_at(message)),
            deliver_at=_moment("deliver_at", message.deliver_at),
            expires_at=_moment("expires_at", message.expires_at),
        )
    except InvalidMessageError as unfit:
        # The fixes are for those who make a message; this one is a dead letter already.
        raise InvalidMessageError(unfit.field, unfit.limit, _FIX) from None


def _id_of(message: Message) -> UUID:
    try:
        return message.message_id
    except ValueError:
        raise InvalidMessageError("message_id", "is not a UUID", _FIX) from None


def _headers_of(message: Message) -> str | None:
    """Return the headers as they are stored here. Their number is not checked, because RocketMQ's model adds some."""
    if message.headers_json is None:
        return None
    headers = own_headers(message)
    for name, value in headers.items():
        if "\0" in name + value or not _is_unicode(name + value):
            raise InvalidMessageError(f"headers[{name!r:.80}]", "must be UTF-8 without NUL", _FIX)
    return stored_headers(headers)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _body_of(message: Message) -> bytes:
    if not isinstance(message.body, bytes):
        raise InvalidMessageError("body", f"must be bytes, not {type(message.body).__name__}", _FIX)
    return encode_body(message.body)[0]


def _created_at(message: Message) -> datetime | None:
    """Return when the message was written; a row that was inserted by SQL may say infinity."""
    try:
        return message.created_at
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def _moment(field: str, moment: datetime | None) -> datetime | None:
    return None if moment is None else checked_time(field, moment)
