"""Messages: what a business transaction appends to the log, and what a handler is given."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, TypedDict, final

from outbox.bodies import check_charset, decode_json, decode_text, encode_body
from outbox.delays import DELAY_LEVELS, MAX_DELAY, DelayLevel
from outbox.errors import InvalidMessageError
from outbox.tracing import TRACE_HEADERS

#: Half messages live in the same log under this topic; only a transaction producer writes it.
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"

MAX_TOPIC = 249
MAX_KEY_BYTES = 1024
MAX_TAGS = 255
MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 * 1024
MAX_CONTENT_TYPE = 255
FIRST_TIME = datetime(1970, 1, 1, tzinfo=UTC)
LAST_TIME = datetime(9000, 1, 1, tzinfo=UTC)

_YEAR_2000 = datetime(2000, 1, 1, tzinfo=UTC)

_TOPIC = re.compile(r"[A-Za-z0-9._%|-]+")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_CONTENT_TYPE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_RESERVED_HEADERS = ("outbox-", "nats-")


class MessageFields(TypedDict, total=False):
    """What a message may have besides topic and body; see `Message`."""

    key: str | None
    tags: str | None
    headers: Mapping[str, str] | None
    content_type: str | None
    deliver_at: datetime | None
    delay: timedelta | DelayLevel | None
    expires_at: datetime | None
    dedup_key: str | None


@final
class Message:
    """One message. A user composes it; a handler gets it back with its place in the log.

    It has one id from the beginning: sent twice it is the same message twice, which an inbox handles once.

    Args:
        topic: 1 to 249 characters of `[A-Za-z0-9._%|-]`.
        body: bytes as they are; `str` becomes UTF-8 `text/plain`; dict, list, dataclass and objects with `__json__()`
            or pydantic's `model_dump`, also one inside the other, become compact JSON, `application/json`. At most
            4 MiB.
        key: the unit of order, over all topics of a subscription; 1 to 1024 bytes of UTF-8. None: no order.
        tags: one string of at most 255 characters for filters.
        headers: at most 64, 16 KiB together, names are HTTP tokens.
        content_type: overrides the one that follows from the body's type.
        deliver_at: not before this moment (an aware datetime). Or `delay`, counted from the insert by the database:
            a timedelta, or one of RocketMQ's levels by name ("1s" … "2h").
        expires_at: after this moment the message becomes a dead letter instead of being delivered.
        dedup_key: a second message with the same one, within a window, is not written; 1 to 1024 bytes of UTF-8.

    A handler finds also `id` (its place in the log), `message_id`, `created_at` and `attempt` (1 at the first).

    Raises:
        InvalidMessageError: naming field, limit and fix; nothing has reached the database then.
    """

    # Not a frozen dataclass: its object.__setattr__ per field would cost a third of the relay's speed.
    __slots__ = (
        "_created_at",
        "_headers",
        "_message_id",
        "attempt",
        "body",
        "content_type",
        "dedup_key",
        "delay",
        "deliver_at",
        "direct",
        "expires_at",
        "id",
        "key",
        "tags",
        "topic",
    )

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
    direct: str | None
    attempt: int
    _created_at: datetime | int | None
    _headers: str | None
    _message_id: uuid.UUID | bytes | str

    def __init__(
        self,
        topic: str,
        body: object,
        *,
        key: str | None = None,
        tags: str | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
        deliver_at: datetime | None = None,
        delay: timedelta | DelayLevel | None = None,
        expires_at: datetime | None = None,
        dedup_key: str | None = None,
    ) -> None:
        self.topic = checked_topic(topic)
        self.body, default_type = encode_body(body)
        self.content_type = default_type if content_type is None else _checked_content_type(content_type, body)
        self.key = None if key is None else _checked_key(key)
        self.tags = None if tags is None else _checked_tags(tags)
        self._headers = _checked_headers(headers) if headers else None
        self.deliver_at = None if deliver_at is None else _checked_time("deliver_at", deliver_at)
        self.expires_at = None if expires_at is None else _checked_expiry(expires_at, self.deliver_at)
        self.delay = None if delay is None else _checked_delay(delay, deliver_at)
        self.dedup_key = None if dedup_key is None else _checked_dedup_key(dedup_key)
        self._message_id = uuid7()
        self.id = None
        self._created_at = None
        self.direct = None
        self.attempt = 1

    @property
    def message_id(self) -> uuid.UUID:
        """Which message it is, wherever it comes; made a UUID when asked for, which costs more than reading its row."""
        if not isinstance(self._message_id, uuid.UUID):
            self._message_id = stored_uuid(self._message_id)
        return self._message_id

    @message_id.setter
    def message_id(self, message_id: uuid.UUID) -> None:
        self._message_id = message_id

    @property
    def created_at(self) -> datetime | None:
        """When the database took it in; made a datetime when asked for, because most handlers never ask."""
        if isinstance(self._created_at, int):
            self._created_at = from_microseconds(self._created_at)
        return self._created_at

    @created_at.setter
    def created_at(self, moment: datetime | None) -> None:
        self._created_at = moment

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers; decoded when asked for, because most handlers never ask."""
        return json.loads(self._headers) if self._headers is not None else {}

    @property
    def headers_json(self) -> str | None:
        """The headers as they are stored: a JSON object of strings, or None."""
        return self._headers

    def headers_json_with(self, trace: Mapping[str, str]) -> str | None:
        """`headers_json` with the headers of a trace besides, as far as they fit into the limits.

        A trace that the user gave stays as it is: then nothing is added, because a `tracestate` belongs to its
        `traceparent`.
        """
        if not trace:
            return self._headers
        own = self.headers
        if any(name.lower() in TRACE_HEADERS for name in own):
            return self._headers
        merged = dict(own)
        for name in TRACE_HEADERS:
            if name not in trace or not _fits({**merged, name: trace[name]}):
                break
            merged[name] = trace[name]
        return _stored_headers(merged) if merged else None

    def text(self) -> str:
        """The body as text, by the charset of its content type, else by UTF-8.

        Raises:
            InvalidMessageError: it is not; the error names the message and its content type.
        """
        return decode_text(self.body, self.content_type, self.message_id)

    def json(self) -> Any:
        """The value that the body is as JSON, whatever its content type.

        Raises:
            InvalidMessageError: it is not; the error names the message and its content type.
        """
        return decode_json(self.body, self.content_type, self.message_id)

    def __repr__(self) -> str:
        return f"<Message {self.message_id} id={self.id} topic={self.topic!r} key={self.key!r} {len(self.body)} bytes>"


def stored_message(
    id: int,
    message_id: uuid.UUID | bytes | str,
    topic: str,
    key: str | None,
    tags: str | None,
    headers: str | None,
    body: bytes,
    content_type: str | None,
    created_at: datetime | int,
    deliver_at: datetime | None,
    expires_at: datetime | None,
    direct: str | None = None,
    attempt: int = 1,
) -> Message:
    """A message as the log holds it, in the order of its columns; nothing is checked again."""
    message = Message.__new__(Message)
    message.id = id
    message._message_id = message_id
    message.topic = topic
    message.key = key
    message.tags = tags
    message._headers = headers
    message.body = body
    message.content_type = content_type
    message._created_at = created_at
    message.deliver_at = deliver_at
    message.expires_at = expires_at
    message.delay = None
    message.dedup_key = None
    message.direct = direct
    message.attempt = attempt
    return message


def stored_uuid(stored: uuid.UUID | bytes | str) -> uuid.UUID:
    """A UUID from the form that a driver returned it in."""
    if isinstance(stored, bytes):
        return uuid.UUID(bytes=stored)
    return uuid.UUID(stored) if isinstance(stored, str) else stored


def from_microseconds(number: int) -> datetime:
    """A moment from PostgreSQL's own form of it: microseconds since 2000."""
    return _YEAR_2000 + timedelta(microseconds=number)


def uuid7() -> uuid.UUID:
    """A version 7 UUID (RFC 9562): 48 bits of milliseconds, then random bits; sorts by time of creation."""
    milliseconds = time.time_ns() // 1_000_000
    randomness = int.from_bytes(os.urandom(10))
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | randomness
    value = value & ~(0xF000 << 64) & ~(0xC000 << 48) | 7 << 76 | 2 << 62
    return uuid.UUID(int=value)


def slot_of(key: str | None, slots: int) -> int:
    """The share of the key space that `key` hashes to: the first 8 bytes of its BLAKE2b; random without a key."""
    if key is None:
        return random.randrange(slots)
    return int.from_bytes(hashlib.blake2b(key.encode()).digest()[:8]) % slots


def _refuse(field: str, limit: str, fix: str) -> NoReturn:
    raise InvalidMessageError(field, limit, fix)


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(field, f"must be a str, not {type(value).__name__}", "pass text")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(field, "holds a lone surrogate, which is not text", "decode the original bytes properly")
    return value


def checked_topic(topic: str) -> str:
    """The topic, if a message can have it.

    Raises:
        InvalidMessageError: naming limit and fix.
    """
    _text("topic", topic)
    if not _TOPIC.fullmatch(topic) or len(topic) > MAX_TOPIC or topic in (".", ".."):
        limit = f"must be 1 to {MAX_TOPIC} characters of [A-Za-z0-9._%|-], not . or .., but is {topic!a:.60}"
        _refuse("topic", limit, "rename it")
    if topic == HALF_TOPIC:
        _refuse("topic", f"{HALF_TOPIC} is reserved for half messages", "use a transaction producer")
    return topic


def _checked_key(key: str) -> str:
    return _checked_name("key", key, "pass None for a message without order")


def _checked_dedup_key(dedup_key: str) -> str:
    return _checked_name("dedup_key", dedup_key, "pass None for a message that may be written any number of times")


def _checked_name(field: str, value: str, without: str) -> str:
    text = _text(field, value)
    if not text:
        _refuse(field, "must not be empty", without)
    if "\0" in text:
        _refuse(field, "must not contain NUL", "strip it")
    if len(text.encode()) > MAX_KEY_BYTES:
        _refuse(field, f"must be at most {MAX_KEY_BYTES} bytes of UTF-8", "hash a longer one")
    return text


def _checked_tags(tags: str) -> str:
    text = _text("tags", tags)
    if not text:
        _refuse("tags", "must not be empty", "pass None for no tags")
    if len(text) > MAX_TAGS or "|" in text or _CONTROL.search(text):
        _refuse(
            "tags", f"must be at most {MAX_TAGS} characters without | and control characters", "shorten or clean it"
        )
    return text


def _checked_headers(headers: Mapping[str, str]) -> str:
    if not isinstance(headers, Mapping):
        _refuse("headers", f"must be a mapping of str to str, not {type(headers).__name__}", "pass a dict")
    if len(headers) > MAX_HEADERS:
        _refuse("headers", f"must be at most {MAX_HEADERS}", "put more into the body")
    for name, value in headers.items():
        _check_header(name, value)
    if len({name.lower() for name in headers}) < len(headers):
        _refuse("headers", "must not hold one name in two cases", "keep one of them")
    if _size(headers) > MAX_HEADER_BYTES:
        _refuse("headers", f"must be at most {MAX_HEADER_BYTES} bytes together", "put more into the body")
    return _stored_headers(headers)


def _stored_headers(headers: Mapping[str, str]) -> str:
    return json.dumps(dict(headers), ensure_ascii=False, separators=(",", ":"))


def _size(headers: Mapping[str, str]) -> int:
    return sum(len(name) + len(value.encode()) for name, value in headers.items())


def _fits(headers: Mapping[str, str]) -> bool:
    return len(headers) <= MAX_HEADERS and _size(headers) <= MAX_HEADER_BYTES


def _check_header(name: str, value: str) -> None:
    if not isinstance(name, str) or not _TOKEN.fullmatch(name):
        _refuse("headers", f"the name {name!r:.80} is not an HTTP token", "use letters, digits and -")
    if name.lower().startswith(_RESERVED_HEADERS):
        _refuse("headers", f"the name {name!r:.80} begins with a reserved prefix", "use another name")
    if name.lower() == "content-type":
        _refuse("headers", "content-type is a field of its own", "pass content_type=")
    text = _text(f"headers[{name!r:.80}]", value)
    if _CONTROL.search(text) or text != text.strip():
        fix = "strip or encode the value"
        _refuse(f"headers[{name!r:.80}]", "must not hold control characters or begin or end with white space", fix)


def _checked_content_type(content_type: str, body: object) -> str:
    known = isinstance(content_type, str) and len(content_type) <= MAX_CONTENT_TYPE
    if not known or not _CONTENT_TYPE.fullmatch(content_type):
        _refuse("content_type", f"must be 1 to {MAX_CONTENT_TYPE} printable ASCII characters", "pass a MIME type")
    check_charset(body, content_type)
    return content_type


def _checked_time(field: str, moment: datetime) -> datetime:
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        _refuse(field, "must be a datetime with a time zone", "pass datetime.now(UTC) + …")
    # Compared without zones: near year 1 or 9999 the conversion itself would overflow.
    if not FIRST_TIME.replace(tzinfo=None) < moment.replace(tzinfo=None) < LAST_TIME.replace(tzinfo=None):
        _refuse(field, "must lie between the years 1970 and 9000", "pass None for no limit")
    return moment.astimezone(UTC)


def _checked_expiry(expires_at: datetime, deliver_at: datetime | None) -> datetime:
    moment = _checked_time("expires_at", expires_at)
    if deliver_at is not None and moment <= deliver_at:
        _refuse("expires_at", "must lie after deliver_at, or nobody will ever get the message", "move one of them")
    return moment


def _checked_delay(delay: timedelta | DelayLevel, deliver_at: datetime | None) -> timedelta:
    if deliver_at is not None:
        _refuse("delay", "must not be given together with deliver_at", "pass one of them")
    if isinstance(delay, str) and delay in DELAY_LEVELS:
        return DELAY_LEVELS[delay]
    if not isinstance(delay, timedelta) or not timedelta(0) <= delay <= MAX_DELAY:
        limit = f"must be a timedelta from 0 to {MAX_DELAY.days} days, or one of {' '.join(DELAY_LEVELS)}"
        _refuse("delay", limit, "pass timedelta(minutes=30), say")
    return delay
