"""Writing to the log, inside the transaction of whoever calls `send`."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from outbox.model.filter.sql92 import Filter
from outbox.model.limits import require_flags
from outbox.model.message import LogRef, Message
from outbox.model.slots import slot_of
from outbox.model.subscription import compensation_of
from outbox.model.topics import EVERY_TOPIC, Topics
from outbox.model.trace_context import trace_headers
from outbox.store.database import Database
from outbox.store.dialects.statements import Script, Statement
from outbox.store.idempotency.dedup import Dedup

#: The most rows and bytes of bodies that one statement carries. (One larger body still goes alone.)
_MOST_ROWS = 5_000
_MOST_BYTES = 16 * 1024 * 1024
_MESSAGE_ID = "CAST(message_id AS {text})"
_PRESENT = "SELECT message_id FROM {message} WHERE {chosen}"


@dataclass(frozen=True, slots=True)
class Direct:
    """The messages that a writer sends without the relay, for a subscription with this selection."""

    subscription: str
    topics: Topics = EVERY_TOPIC
    tags: tuple[str, ...] | None = None
    filter: Filter | None = None

    def takes(self, message: Message) -> bool:
        """Return True for a selected message without key, `deliver_at`, delay and expiry."""
        plain = message.key is None and message.deliver_at is None and message.delay is None
        if not plain or message.expires_at is not None:
            return False
        of_topics = self.topics.everything or self.topics.matches(message.topic)
        of_tags = self.tags is None or message.tags in self.tags
        return of_topics and of_tags and (self.filter is None or self.filter.matches(message))


class Appended(NamedTuple):
    """The result of a write.

    `message_ids`: the ids of all messages, in order. `messages`: the inserted messages, without repetitions. `direct`:
    log ids and ids of the messages that the writer is to send.
    """

    message_ids: list[UUID]
    messages: Sequence[Message]
    direct: list[LogRef]


class Writing:
    """Appends to the log of one outbox."""

    def __init__(self, database: Database, dedup_window: timedelta) -> None:
        self._database = database
        self._dedup = Dedup(database, dedup_window)

    def append(
        self, messages: Sequence[Message], *, lock_keys: bool = False, direct: Direct | None = None
    ) -> Script[Appended]:
        """Insert messages; ids in the log follow the order of the list.

        A message with a known dedup key is not inserted; the id of the first message is returned. `lock_keys`: make
        other writers of the same keys wait. `direct`: the messages that the writer will send.
        """
        require_flags(lock_keys=lock_keys)
        if lock_keys and self._database.dialect.locks.keys is not None:
            keys = [message.key for message in messages if message.key is not None]
            # Equal keys of two schemas are two keys.
            seed = zlib.crc32((self._database.schema or "").encode())
            yield Statement(self._database.dialect.locks.keys, {"keys": keys, "seed": seed}, returns=True)
        written = Appended([message.message_id for message in messages], messages, [])
        if any(message.dedup_key is not None for message in messages):
            first = yield from self._dedup.claim(messages)
            ids = [first.get(place, id) for place, id in enumerate(written.message_ids)]
            written = Appended(ids, [m for place, m in enumerate(messages) if place not in first], [])
        for part in _parts(written.messages):
            yield from self._insert(part, direct, written)
        return written

    def _insert(self, messages: Sequence[Message], direct: Direct | None, written: Appended) -> Script[None]:
        slots, trace = self._database.slots, trace_headers(messages[0].topic, len(messages))
        compensation = None
        rows = []
        for m in messages:
            ours = direct.subscription if direct is not None and direct.takes(m) else None
            if ours is not None:
                compensation = compensation_of(ours)
            rows.append((
                m.message_id, m.topic, m.key, slot_of(m.key, slots), m.tags, m.headers_json_with(trace), m.body,
                m.content_type, m.deliver_at, m.delay, m.expires_at, ours,
            ))  # fmt: skip
        places = yield from self._database.dialect.writes.append(self._database.names, rows, compensation=compensation)
        if places:
            placed = zip(places, messages, strict=True)
            written.direct.extend((id, m.message_id) for (id, marked), m in placed if marked)


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
