"""Writing to the log, inside the transaction of whoever calls `send`."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from outbox.model.limits import require_flags
from outbox.model.message import Message
from outbox.model.slots import slot_of
from outbox.model.trace_context import trace_headers
from outbox.store.database import Database
from outbox.store.dialects.statements import Script, Statement
from outbox.store.idempotency.dedup import Dedup
from outbox.store.idempotency.withdrawals import Withdrawing

#: The most rows and bytes of bodies that one statement carries. (One larger body still goes alone.)
_MOST_ROWS = 5_000
_MOST_BYTES = 16 * 1024 * 1024
_MESSAGE_ID = "CAST(message_id AS {text})"
_PRESENT = "SELECT message_id FROM {message} WHERE {chosen}"


class Appended(NamedTuple):
    """The result of a write.

    `message_ids`: the ids of all messages, in order. `messages`: the inserted messages, without repetitions.
    """

    message_ids: list[UUID]
    messages: Sequence[Message]


class Writing:
    """Appends to the log of one outbox."""

    def __init__(self, database: Database, dedup_window: timedelta) -> None:
        self._database = database
        self._withdraw = Withdrawing(database).withdraw
        self._dedup = Dedup(database, dedup_window, self._withdraw)

    def append(self, messages: Sequence[Message], *, lock_keys: bool = False) -> Script[Appended]:
        """Insert messages; ids in the log follow the order of the list.

        A message with a known dedup key is not inserted; the id of the first message is returned. `lock_keys`: make
        other writers of the same keys wait.
        """
        require_flags(lock_keys=lock_keys)
        if lock_keys and self._database.dialect.locks.keys is not None:
            keys = [message.key for message in messages if message.key is not None]
            # Equal keys of two schemas are two keys.
            seed = zlib.crc32((self._database.schema or "").encode())
            yield Statement(self._database.dialect.locks.keys, {"keys": keys, "seed": seed}, returns=True)
        written = Appended([message.message_id for message in messages], messages)
        if any(message.dedup_key is not None for message in messages):
            first = yield from self._dedup.claim(messages)
            ids = [first.get(place, id) for place, id in enumerate(written.message_ids)]
            written = Appended(ids, [m for place, m in enumerate(messages) if place not in first])
        for part in _parts(written.messages):
            yield from self._insert(part)
        return written

    def withdraw(self, message: UUID | str) -> Script[bool]:
        """Take a delayed message back, by its id or its dedup key; return whether that is in time."""
        return self._dedup.withdraw(message) if isinstance(message, str) else self._withdraw(message)

    def _insert(self, messages: Sequence[Message]) -> Script[None]:
        slots, trace = self._database.slots, trace_headers(messages[0].topic, len(messages))
        rows = [
            (
                m.message_id, m.topic, m.key, slot_of(m.key, slots), m.tags, m.headers_json_with(trace), m.body,
                m.content_type, m.deliver_at, m.delay, m.expires_at,
            )
            for m in messages
        ]  # fmt: skip
        yield from self._database.dialect.writes.append(self._database.names, rows)


def present(database: Database, ids: Collection[UUID]) -> Script[set[UUID]]:
    """Return the ids that the connection sees in the log."""
    statement = database.sql(_PRESENT, chosen=database.among(database.sql(_MESSAGE_ID), texts="ids"))
    bound = {"ids": database.bind(str(database.dialect.values.bind_uuid(id)) for id in ids)}
    return {UUID(str(id)) for (id,) in (yield Statement(statement, bound, returns=True))}


def _parts(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """Cut the messages into parts for one statement each, by `_MOST_ROWS` and `_MOST_BYTES`."""
    parts = []
    first = size = 0
    for at, message in enumerate(messages):
        if at > first and (at - first == _MOST_ROWS or size + len(message.body) > _MOST_BYTES):
            parts.append(messages[first:at])
            first, size = at, 0
        size += len(message.body)
    if first < len(messages):
        parts.append(messages[first:])
    return parts
