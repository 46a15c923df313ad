"""Messages: what a business transaction appends to the log, and what a handler is given."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, final

from outbox.errors import InvalidMessageError

#: Half messages live in the same log under this topic; only a transaction producer writes it.
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"

MAX_TOPIC = 249
MAX_KEY_BYTES = 1024
MAX_TAGS = 255
MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 * 1024
MAX_CONTENT_TYPE = 255
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_DELAY = timedelta(days=36_525)
FIRST_TIME = datetime(1970, 1, 1, tzinfo=UTC)
LAST_TIME = datetime(9000, 1, 1, tzinfo=UTC)

_YEAR_2000 = datetime(2000, 1, 1, tzinfo=UTC)

_TOPIC = re.compile(r"[A-Za-z0-9._%|-]+")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_CONTENT_TYPE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_RESERVED_HEADERS = ("outbox-", "nats-")


@final
class Message:
    """One message. A user composes it; a handler gets it back with its place in the log.

    Args:
        topic: 1 to 249 characters of `[A-Za-z0-9._%|-]`.
        body: bytes as they are; `str` becomes UTF-8 `text/plain`; dict, list, dataclass and objects with
            `model_dump` become compact JSON, `application/json`. At most 4 MiB.
        key: the unit of order, over all topics of a subscription; 1 to 1024 bytes of UTF-8. None: no order.
        tags: one string of at most 255 characters for filters.
        headers: at most 64, 16 KiB together, names are HTTP tokens.
        content_type: overrides the one that follows from the body's type.
        deliver_at: not before this moment (an aware datetime). Or `delay`, counted from the insert by the database.
        expires_at: after this moment the message becomes a dead letter instead of being delivered.

    A handler finds also `id` (its place in the log), `message_id`, `created_at` and `attempt` (1 at the first).

    Raises:
        InvalidMessageError: naming field, limit and fix; nothing has reached the database then.
    """

    # Not a frozen dataclass: its object.__setattr__ per field would cost a third of the relay's speed.
    __slots__ = (
        "_created_at",
        "_headers",
        "attempt",
        "body",
        "content_type",
        "delay",
        "deliver_at",
        "expires_at",
        "id",
        "key",
        "message_id",
        "tags",
        "topic",
    )

    id: int | None
    message_id: uuid.UUID
    topic: str
    key: str | None
    tags: str | None
    body: bytes
    content_type: str | None
    deliver_at: datetime | None
    expires_at: datetime | None
    delay: timedelta | None
    attempt: int
    _created_at: datetime | int | None
    _headers: str | None

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
        delay: timedelta | None = None,
        expires_at: datetime | None = None,
    ) -> None:
        self.topic = _checked_topic(topic)
        self.body, default_type = _encoded(body)
        self.content_type = default_type if content_type is None else _checked_content_type(content_type)
        self.key = None if key is None else _checked_key(key)
        self.tags = None if tags is None else _checked_tags(tags)
        self._headers = _checked_headers(headers) if headers else None
        self.deliver_at = None if deliver_at is None else _checked_time("deliver_at", deliver_at)
        self.expires_at = None if expires_at is None else _checked_time("expires_at", expires_at)
        self.delay = None if delay is None else _checked_delay(delay, deliver_at)
        self.message_id = uuid7()
        self.id = None
        self._created_at = None
        self.attempt = 1

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

    def __repr__(self) -> str:
        return f"<Message {self.message_id} id={self.id} topic={self.topic!r} key={self.key!r} {len(self.body)} bytes>"


def stored_message(
    id: int,
    message_id: uuid.UUID,
    topic: str,
    key: str | None,
    tags: str | None,
    headers: str | None,
    body: bytes,
    content_type: str | None,
    created_at: datetime | int,
    deliver_at: datetime | None,
    expires_at: datetime | None,
    attempt: int = 1,
) -> Message:
    """A message as the log holds it, in the order of its columns; nothing is checked again."""
    message = Message.__new__(Message)
    message.id = id
    message.message_id = message_id
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
    message.attempt = attempt
    return message


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


def _checked_topic(topic: str) -> str:
    if not isinstance(topic, str) or not _TOPIC.fullmatch(topic) or len(topic) > MAX_TOPIC or topic in (".", ".."):
        _refuse("topic", f"must be 1 to {MAX_TOPIC} characters of [A-Za-z0-9._%|-], not . or ..", "rename it")
    if topic == HALF_TOPIC:
        _refuse("topic", f"{HALF_TOPIC} is reserved for half messages", "use a transaction producer")
    return topic


def _checked_key(key: str) -> str:
    text = _text("key", key)
    if not text:
        _refuse("key", "must not be empty", "pass None for a message without order")
    if "\0" in text:
        _refuse("key", "must not contain NUL", "strip it")
    if len(text.encode()) > MAX_KEY_BYTES:
        _refuse("key", f"must be at most {MAX_KEY_BYTES} bytes of UTF-8", "hash a longer one")
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
    if sum(len(name) + len(value.encode()) for name, value in headers.items()) > MAX_HEADER_BYTES:
        _refuse("headers", f"must be at most {MAX_HEADER_BYTES} bytes together", "put more into the body")
    return json.dumps(dict(headers), ensure_ascii=False, separators=(",", ":"))


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


def _checked_content_type(content_type: str) -> str:
    known = isinstance(content_type, str) and len(content_type) <= MAX_CONTENT_TYPE
    if not known or not _CONTENT_TYPE.fullmatch(content_type):
        _refuse("content_type", f"must be 1 to {MAX_CONTENT_TYPE} printable ASCII characters", "pass a MIME type")
    return content_type


def _checked_time(field: str, moment: datetime) -> datetime:
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        _refuse(field, "must be a datetime with a time zone", "pass datetime.now(UTC) + …")
    # Compared without zones: near year 1 or 9999 the conversion itself would overflow.
    if not FIRST_TIME.replace(tzinfo=None) < moment.replace(tzinfo=None) < LAST_TIME.replace(tzinfo=None):
        _refuse(field, "must lie between the years 1970 and 9000", "pass None for no limit")
    return moment.astimezone(UTC)


def _checked_delay(delay: timedelta, deliver_at: datetime | None) -> timedelta:
    if deliver_at is not None:
        _refuse("delay", "must not be given together with deliver_at", "pass one of them")
    if not isinstance(delay, timedelta) or not timedelta(0) <= delay <= MAX_DELAY:
        _refuse("delay", f"must be a timedelta from 0 to {MAX_DELAY.days} days", "pass timedelta(minutes=30), say")
    return delay


def _encoded(body: object) -> tuple[bytes, str | None]:
    """The body's bytes and the content type that follows from its Python type."""
    content_type: str | None = None
    if isinstance(body, bytes | bytearray | memoryview):
        data = bytes(body)
    elif isinstance(body, str):
        data, content_type = _text("body", body).encode(), "text/plain"
    else:
        data, content_type = _json(body), "application/json"
    if len(data) > MAX_BODY_BYTES:
        _refuse("body", f"must be at most {MAX_BODY_BYTES} bytes, not {len(data)}", "store it elsewhere, send a link")
    return data, content_type


def _json(body: object) -> bytes:
    try:
        value = _plain(body)
        _check_names(value)
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidMessageError):
            raise
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidMessageError("body", f"is not JSON: {reason:.200}", "pass bytes, or plain values only") from error


def _plain(body: object) -> dict[Any, Any] | list[Any]:
    """What a body means as JSON; only containers are accepted, so that a forgotten `json.dumps` is noticed."""
    if isinstance(body, dict | list):
        return body
    if dataclasses.is_dataclass(body) and not isinstance(body, type):
        return dataclasses.asdict(body)
    dump = getattr(body, "model_dump", None)
    if callable(dump) and not isinstance(body, type):
        dumped: dict[Any, Any] | list[Any] = dump(mode="json")
        return dumped
    accepted = "bytes, str, dict, list, a dataclass or an object with model_dump"
    _refuse("body", f"must be {accepted}, not {type(body).__name__}", "convert it")


def _check_names(value: object) -> None:
    """JSON has text names only; `json.dumps` would turn 1, True and None into text without a word."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                _refuse("body", f"the JSON name {name!r:.80} must be a str", "convert the dict's keys")
            _check_names(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_names(inner)
