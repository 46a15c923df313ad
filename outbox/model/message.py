"""Messages: what a business transaction appends to the log, and what a handler receives."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, Never, TypedDict, Unpack, final

from outbox.model.encoding import TOMBSTONE_TYPE, checked_charset, decode_json, decode_text, encode_body
from outbox.model.limits import (
    DelayLevel,
    HeaderRoom,
    checked_content_type,
    checked_dedup,
    checked_dedup_key,
    checked_delay,
    checked_expiry,
    checked_headers,
    checked_key,
    checked_tags,
    checked_time,
    checked_topic,
    require_tombstone,
    stored_headers,
)
from outbox.model.trace_context import BAGGAGE, TRACE_HEADERS

#: The header, named as in RocketMQ, with the id of a message's transaction in RocketMQ's model.
TRANSACTION_ID = "__transactionId__"

#: A message's place in the log, and its id.

#: What becomes of a second message with a dedup key: the first one stays, or the second replaces it.
Dedup = Literal["keep", "replace"]

_YEAR_2000 = datetime(2000, 1, 1, tzinfo=UTC)


class MessageFields(TypedDict, total=False):
    """The fields of a message besides topic and body; see `Message`."""

    key: str | None
    tags: str | None
    headers: Mapping[str, str] | None
    content_type: str | None
    deliver_at: datetime | None
    delay: timedelta | DelayLevel | None
    expires_at: datetime | None
    dedup_key: str | None
    dedup: Dedup


_FIELDS = tuple(MessageFields.__annotations__)


class ReplacedFields(MessageFields, total=False):
    """The fields that `Message.replace` may change."""

    topic: str
    body: object


@final
class Message:
    """One message. A user makes it; a handler gets it back with its log id.

    A message has its `message_id` from the beginning. If a message is sent twice, both copies have the same id, and an
    inbox handles one copy. `replace` makes a message with another id.

    Args:
        topic: 1 to 249 characters of `[A-Za-z0-9._%|-]`.
        body: bytes stay as they are; `str` becomes UTF-8 `text/plain`. dict, list, dataclass and objects with
            `__json__()` or pydantic's `model_dump`, also nested, become compact JSON, `application/json`. Inside,
            UUIDs, Decimals, dates and times become text, and Enums their values. At most 4 MiB. `Tombstone()` is a
            null for Kafka, and needs a key.
        key: the unit of order, over all topics of a subscription; 1 to 1024 bytes of UTF-8. None: no order.
        tags: one string of at most 255 characters for filters.
        headers: at most 160, 32 KiB together, names are HTTP tokens.
        content_type: overrides the content type that follows from the body's type.
        deliver_at: the message is not delivered before this moment (an aware datetime). Instead, `delay` may be given,
            which the database counts from the insert: a timedelta, or one of RocketMQ's levels by name ("1s" … "2h").
        expires_at: after this moment the message becomes a dead letter instead of being delivered.
        dedup_key: a second message with the same key, within a window, is not written; 1 to 1024 bytes of UTF-8.
        dedup: "keep" does so. "replace" writes this message in any case, and takes the earlier one back if that one is
            delayed and not due yet.

    A handler also finds `id` (the log id), `message_id`, `created_at` and `attempt` (1 at the first).

    Raises:
        InvalidMessageError: a field breaks a limit. The error names field, limit and fix.
    """

    # Not a frozen dataclass: its object.__setattr__ per field would cost a third of the relay's speed.
    __slots__ = ("_created_at", "_headers", "_message_id", "attempt", "body", "content_type", "dedup", "dedup_key",
                 "delay", "deliver_at", "expires_at", "id", "key", "tags", "topic")  # fmt: skip

    id: int | None
    topic: str
    key: str | None
    tags: str | None
    body: bytes
    content_type: str | None
    deliver_at: datetime | None
    expires_at: datetime | None
    delay: timedelta | None
    dedup_key: str | None
    dedup: Dedup
    attempt: int
    _created_at: datetime | int | None
    _headers: str | None
    _message_id: uuid.UUID | bytes | str

    def __init__(self, topic: str, body: object, *others: Never, **fields: Unpack[MessageFields]) -> None:
        if others:
            raise TypeError(
                "Message takes a topic and a body, and everything else by name. RocketMQ's Message(topic, tags, keys,"
                " body) is Message(topic, body, tags=…, key=…) here"
            )
        content_type, key, tags = fields.pop("content_type", None), fields.pop("key", None), fields.pop("tags", None)
        headers, dedup_key = fields.pop("headers", None), fields.pop("dedup_key", None)
        dedup = fields.pop("dedup", "keep")
        deliver_at, delay = fields.pop("deliver_at", None), fields.pop("delay", None)
        expires_at = fields.pop("expires_at", None)
        if fields:
            raise TypeError(f"a message has no field {next(iter(fields))!r}; there are {', '.join(_FIELDS)}")
        self.topic = checked_topic(topic)
        self.body, default_type = encode_body(body)
        self.content_type = (
            default_type if content_type is None else checked_charset(body, checked_content_type(content_type))
        )
        self.key = None if key is None else checked_key(key)
        if default_type == TOMBSTONE_TYPE:
            require_tombstone(self.key, content_type)
        self.tags = None if tags is None else checked_tags(tags)
        self._headers = checked_headers(headers) if headers else None
        self.deliver_at = None if deliver_at is None else checked_time("deliver_at", deliver_at)
        self.expires_at = None if expires_at is None else checked_expiry(expires_at, self.deliver_at)
        self.delay = None if delay is None else checked_delay(delay, deliver_at)
        self.dedup_key = None if dedup_key is None else checked_dedup_key(dedup_key)
        self.dedup = checked_dedup(dedup, dedup_key)
        self._message_id = uuid7()
        self.id = None
        self._created_at = None
        self.attempt = 1

    @property
    def message_id(self) -> uuid.UUID:
        """The message's id, the same in every copy."""
        # Made a UUID only here, because a UUID costs more than reading the message's row.
        if not isinstance(self._message_id, uuid.UUID):
            self._message_id = stored_uuid(self._message_id)
        return self._message_id

    @message_id.setter
    def message_id(self, message_id: uuid.UUID) -> None:
        self._message_id = message_id

    @property
    def created_at(self) -> datetime | None:
        """The moment of the insert, by the database's clock; made a datetime only here, because few handlers ask."""
        if isinstance(self._created_at, int):
            self._created_at = from_microseconds(self._created_at)
        return self._created_at

    @created_at.setter
    def created_at(self, moment: datetime | None) -> None:
        self._created_at = moment

    @property
    def id_text(self) -> str:
        """The message's id as text; made from a row without a UUID in between."""
        stored = self._message_id
        if not isinstance(stored, bytes):
            return str(self.message_id)
        # In groups of four digits, so that few parts have to be put together.
        digits = stored.hex("-", 2)
        return f"{digits[:4]}{digits[5:29]}{digits[30:34]}{digits[35:]}"

    @property
    def created_at_text(self) -> str | None:
        """`created_at` as ISO 8601 in UTC; made from a row without a datetime in between."""
        moment = self._created_at
        if isinstance(moment, int):
            second, microsecond = divmod(moment, 1_000_000)
            return f"{_second_text(second)}.{microsecond:06d}+00:00" if microsecond else f"{_second_text(second)}+00:00"
        return None if moment is None else moment.astimezone(UTC).isoformat()

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers; decoded only here, because few handlers ask."""
        return json.loads(self._headers) if self._headers is not None else {}

    @property
    def headers_json(self) -> str | None:
        """The headers as stored: a JSON object of strings, or None."""
        return self._headers

    def headers_json_with(self, trace: Mapping[str, str]) -> str | None:
        """Return `headers_json` with the headers of a trace added; see `traced`."""
        if not trace:
            return self._headers
        merged = traced(self.headers, trace)
        return stored_headers(merged) if merged else None

    @property
    def is_tombstone(self) -> bool:
        """Whether the body is a `Tombstone`: what the key stands for is gone."""
        return self.content_type == TOMBSTONE_TYPE

    @property
    def transaction_id(self) -> str | None:
        """The id of the message's transaction in RocketMQ's model, if any."""
        return self.headers.get(TRANSACTION_ID)

    def replace(self, **fields: Unpack[ReplacedFields]) -> Message:
        """Make a message with a new id and these fields; all other fields are copied.

        A new body brings the content type that follows from its type, unless a content type is given, too. A new
        `delay` or `deliver_at` replaces both old values. The `dedup_key` is copied as well: give another key if both
        messages are to be written.

        Raises:
            InvalidMessageError: as from `Message`.
        """
        kept: dict[str, Any] = {
            "topic": self.topic, "body": self.body, "key": self.key, "tags": self.tags, "headers": self.headers,
            "content_type": self.content_type, "deliver_at": self.deliver_at, "delay": self.delay,
            "expires_at": self.expires_at, "dedup_key": self.dedup_key, "dedup": self.dedup,
        }  # fmt: skip
        if "body" in fields:
            del kept["content_type"]
        if fields.get("delay") is not None or fields.get("deliver_at") is not None:
            del kept["delay"], kept["deliver_at"]
        return Message(**kept | dict(fields))

    #: Called by `copy.replace`, which Python has from 3.13 on.
    __replace__ = replace

    def sent_as(self, topic: str, *, headers_json: str | None, body: bytes, content_type: str | None) -> Message:
        """Return the message as a destination is to get it, with the same ids and key; nothing is checked again."""
        return stored_message((
            self.id, self._message_id, topic, self.key, self.tags, headers_json, body, content_type, self._created_at,
            self.deliver_at, self.expires_at, self.attempt,
        ))  # fmt: skip

    def text(self) -> str:
        """Return the body as text, by the charset of its content type, else by UTF-8.

        Raises:
            InvalidMessageError: the body is no such text; the error names the message and its content type.
        """
        return decode_text(self.body, self.content_type, self.message_id)

    def json(self) -> Any:
        """Return the body's JSON value, whatever its content type.

        Raises:
            InvalidMessageError: the body is not JSON; the error names the message and its content type.
        """
        return decode_json(self.body, self.content_type, self.message_id)

    def __repr__(self) -> str:
        return f"<Message {self.message_id} id={self.id} topic={self.topic!r} key={self.key!r} {len(self.body)} bytes>"


def traced(headers: Mapping[str, str], trace: Mapping[str, str]) -> dict[str, str]:
    """Return headers with the headers of a trace and of its baggage added, as far as the limits allow.

    A user's own trace stays as it is: nothing of another trace is added, because a `tracestate` belongs to its
    `traceparent`. A user's own baggage stays as well.
    """
    merged = dict(headers)
    own = {name.lower() for name in merged}
    names = [name for name in trace if name.lower() != BAGGAGE]
    room = HeaderRoom(merged)
    if own.isdisjoint((*TRACE_HEADERS, *(name.lower() for name in names))):
        for name in names:
            if not room.takes(name, trace[name]):
                break
            merged[name] = trace[name]
    if BAGGAGE not in own and BAGGAGE in trace and room.takes(BAGGAGE, trace[BAGGAGE]):
        merged[BAGGAGE] = trace[BAGGAGE]
    return merged


def stored_message(columns: Sequence[Any]) -> Message:
    """Return a message of the log; columns are in the order of the table, and are not checked again.

    The last one, `attempt`, may be missing.
    """
    message = Message.__new__(Message)
    (
        message.id, message._message_id, message.topic, message.key, message.tags, message._headers, message.body,
        message.content_type, message._created_at, message.deliver_at, message.expires_at,
    ) = columns[:11]  # fmt: skip
    message.attempt = columns[11] if len(columns) > 11 else 1
    message.delay = None
    message.dedup_key = None
    message.dedup = "keep"
    return message


def stored_uuid(stored: uuid.UUID | bytes | str) -> uuid.UUID:
    """Return a UUID from a driver's form of a UUID."""
    if isinstance(stored, bytes):
        return uuid.UUID(bytes=stored)
    return uuid.UUID(stored) if isinstance(stored, str) else stored


def from_microseconds(number: int) -> datetime:
    """Return a moment from PostgreSQL's own form: microseconds since 2000."""
    return _YEAR_2000 + timedelta(microseconds=number)


# Cached, because messages of one second come one after the other.
@lru_cache(maxsize=64)
def _second_text(second: int) -> str:
    """Return the ISO form of a moment, in seconds since 2000, without its offset."""
    return (_YEAR_2000 + timedelta(seconds=second)).replace(tzinfo=None).isoformat()


def uuid7() -> uuid.UUID:
    """Return a version 7 UUID (RFC 9562): 48 bits of milliseconds, then random bits; sorts by time of creation."""
    milliseconds = time.time_ns() // 1_000_000
    randomness = int.from_bytes(os.urandom(10))
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | randomness
    value = value & ~(0xF000 << 64) & ~(0xC000 << 48) | 7 << 76 | 2 << 62
    return uuid.UUID(int=value)
