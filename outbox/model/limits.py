"""The limits of a message's fields, checked before any SQL.

Each check returns the field as stored, or raises an `InvalidMessageError` with field, limit and fix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NoReturn, get_args

from outbox.errors import InvalidMessageError

DelayLevel = Literal[
    "1s", "5s", "10s", "30s", "1m", "2m", "3m", "4m", "5m", "6m", "7m", "8m", "9m", "10m", "20m", "30m", "1h", "2h"
]
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours"}
#: In the order of RocketMQ's `messageDelayLevel`: level 1 is the first, level 18 the last.
DELAY_LEVELS: Mapping[str, timedelta] = MappingProxyType(
    {name: timedelta(**{_UNITS[name[-1]]: int(name[:-1])}) for name in get_args(DelayLevel)}
)
#: Half messages live in the same log under this topic; only a transaction producer writes it.
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"

MAX_TOPIC = 249
MAX_KEY_BYTES = 1024
MAX_TAGS = 255
MAX_HEADERS = 160
MAX_HEADER_BYTES = 32 * 1024
MAX_CONTENT_TYPE = 255
MAX_DELAY = timedelta(days=36_525)
#: The reason of an order is stored with each message that it is about.
MAX_NOTE = 2_000
#: The largest number of a BIGINT, such as a log id.
MAX_NUMBER = 2**63 - 1
_FIRST_TIME, _LAST_TIME = datetime(1970, 1, 1), datetime(9000, 1, 1)  # noqa: DTZ001 - compared without zones

_TOPIC = re.compile(r"[A-Za-z0-9._%|-]+")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_CONTENT_TYPE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_RESERVED_HEADERS = ("outbox-", "nats-")
#: Returns a string as JSON. `json` uses the same function, but makes an encoder at each call.
_quoted = json.encoder.encode_basestring


def _refuse(field: str, limit: str, fix: str) -> NoReturn:
    raise InvalidMessageError(field, limit, fix)


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(field, f"must be a str, not {type(value).__name__}", "pass text")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(field, "holds a lone surrogate, which is not text", "decode the original bytes properly")
    # A subclass of str, such as a StrEnum, becomes plain text: the caches below give equal texts to other callers.
    return value if type(value) is str else str.__str__(value)


def checked_topic(topic: str) -> str:
    """Return the topic, if a message can have it."""
    return _known_topic(topic if type(topic) is str else _text("topic", topic))


# Cached, like the names of headers: an application sends the same few topics again and again.
@lru_cache(maxsize=1024)
def _known_topic(topic: str) -> str:
    _text("topic", topic)
    if not _TOPIC.fullmatch(topic) or len(topic) > MAX_TOPIC or topic in (".", ".."):
        limit = f"must be 1 to {MAX_TOPIC} characters of [A-Za-z0-9._%|-], not . or .., but is {topic!a:.60}"
        _refuse("topic", limit, "rename it")
    if topic == HALF_TOPIC:
        _refuse("topic", f"{HALF_TOPIC} is reserved for half messages", "use a transaction producer")
    return topic


def checked_key(key: str) -> str:
    """Return the key, which is the unit of order."""
    return _checked_name("key", key, "pass None for a message without order")


def checked_dedup_key(dedup_key: str) -> str:
    """Return the dedup key, by which a repetition is recognised."""
    return _checked_name("dedup_key", dedup_key, "pass None for a message that may be written any number of times")


def checked_dedup(dedup: Literal["keep", "replace"], dedup_key: str | None) -> Literal["keep", "replace"]:
    """Return what becomes of a repetition."""
    if dedup not in ("keep", "replace"):
        _refuse("dedup", f'must be "keep" or "replace", not {dedup!r:.80}', "leave it out to keep the first message")
    if dedup == "replace" and dedup_key is None:
        _refuse("dedup", '"replace" needs a dedup_key', "give the key by which the earlier message is found")
    return dedup


def _checked_name(field: str, value: str, without: str) -> str:
    if type(value) is str and 0 < len(value) <= MAX_KEY_BYTES and value.isascii() and "\0" not in value:
        return value
    text = _text(field, value)
    if not text:
        _refuse(field, "must not be empty", without)
    if "\0" in text:
        _refuse(field, "must not contain NUL", "strip it")
    if len(text.encode()) > MAX_KEY_BYTES:
        _refuse(field, f"must be at most {MAX_KEY_BYTES} bytes of UTF-8", "hash a longer one")
    return text


def checked_tags(tags: str) -> str:
    """Return the tags, which are one string for filters."""
    text = _text("tags", tags)
    if not text:
        _refuse("tags", "must not be empty", "pass None for no tags")
    if len(text) > MAX_TAGS or "|" in text or _CONTROL.search(text):
        _refuse(
            "tags", f"must be at most {MAX_TAGS} characters without | and control characters", "shorten or clean it"
        )
    return text


def checked_headers(headers: Mapping[str, str]) -> str:
    """Return all headers as the text of a JSON object."""
    if type(headers) is not dict and not isinstance(headers, Mapping):
        _refuse("headers", f"must be a mapping of str to str, not {type(headers).__name__}", "pass a dict")
    if len(headers) > MAX_HEADERS:
        _refuse("headers", f"must be at most {MAX_HEADERS}", "put more into the body")
    lowered: set[str] = set()
    for name, value in headers.items():
        if not isinstance(name, str):
            _refuse("headers", f"the name {name!r:.80} is not an HTTP token", "use letters, digits and -")
        lowered.add(_known_header_name(name))
        # Nearly all values are plain ASCII, and need no closer look.
        if not (isinstance(value, str) and value.isascii() and value.isprintable() and value.strip() == value):
            _check_header_value(name, value)
    if len(lowered) < len(headers):
        _refuse("headers", "must not hold one name in two cases", "keep one of them")
    stored = stored_headers(headers)
    # JSON only adds to the headers (quotes, escapes): if ASCII JSON keeps the limit, the headers do, without a count.
    if not (len(stored) <= MAX_HEADER_BYTES and stored.isascii()) and _size(headers) > MAX_HEADER_BYTES:
        _refuse("headers", f"must be at most {MAX_HEADER_BYTES} bytes together", "put more into the body")
    return stored


def stored_headers(headers: Mapping[str, str]) -> str:
    """Return headers as they are stored: compact JSON."""
    return f"{{{','.join([f'{_quoted(name)}:{_quoted(value)}' for name, value in headers.items()])}}}"


def _size(headers: Mapping[str, str]) -> int:
    return sum(len(name) + (len(value) if value.isascii() else len(value.encode())) for name, value in headers.items())


class HeaderRoom:
    """The room that headers leave for more headers, of another's making."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._number, self._bytes = len(headers), _size(headers)

    def takes(self, name: str, value: str) -> bool:
        """Return whether one more header may be stored, which takes some of the room then."""
        try:
            checked_headers(more := {name: value})
        except InvalidMessageError:
            return False
        size = self._bytes + _size(more)
        if self._number >= MAX_HEADERS or size > MAX_HEADER_BYTES:
            return False
        self._number, self._bytes = self._number + 1, size
        return True


@lru_cache(maxsize=1024)
def _known_header_name(name: str) -> str:
    """Return a header's name in lower case."""
    if not _TOKEN.fullmatch(name):
        _refuse("headers", f"the name {name!r:.80} is not an HTTP token", "use letters, digits and -")
    lowered = name.lower()
    if lowered.startswith(_RESERVED_HEADERS):
        _refuse("headers", f"the name {name!r:.80} begins with a reserved prefix", "use another name")
    if lowered == "content-type":
        _refuse("headers", "content-type is a field of its own", "pass content_type=")
    return lowered


def _check_header_value(name: str, value: str) -> None:
    text = _text(f"headers[{name!r:.80}]", value)
    if _CONTROL.search(text) or text != text.strip():
        fix = "strip or encode the value"
        _refuse(f"headers[{name!r:.80}]", "must not hold control characters or begin or end with white space", fix)


def require_tombstone(key: str | None, content_type: str | None) -> None:
    """Refuse a tombstone of nothing, or one with content."""
    if key is None:
        _refuse("key", "must not be None beside a Tombstone", "pass the key of what is gone")
    if content_type is not None:
        _refuse("content_type", "must be left out beside a Tombstone", "pass None")


def checked_content_type(content_type: str) -> str:
    """Return the content type; a contradiction to the body is found elsewhere."""
    known = isinstance(content_type, str) and len(content_type) <= MAX_CONTENT_TYPE
    if not known or not _CONTENT_TYPE.fullmatch(content_type):
        _refuse("content_type", f"must be 1 to {MAX_CONTENT_TYPE} printable ASCII characters", "pass a MIME type")
    return content_type


def checked_time(field: str, moment: datetime) -> datetime:
    """Return a moment, converted to UTC."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        _refuse(field, "must be a datetime with a time zone", "pass datetime.now(UTC) + …")
    # Compared without zones: near year 1 or 9999 the conversion itself would overflow.
    if not _FIRST_TIME < moment.replace(tzinfo=None) < _LAST_TIME:
        _refuse(field, "must lie between the years 1970 and 9000", "pass None for no limit")
    return moment.astimezone(UTC)


def checked_expiry(expires_at: datetime, deliver_at: datetime | None) -> datetime:
    """Return, in UTC, the moment after which a message with this `deliver_at` becomes a dead letter."""
    moment = checked_time("expires_at", expires_at)
    if deliver_at is not None and moment <= deliver_at:
        _refuse("expires_at", "must lie after deliver_at, or nobody will ever get the message", "move one of them")
    return moment


def checked_delay(delay: timedelta | DelayLevel, deliver_at: datetime | None) -> timedelta:
    """Return how long a message waits that has no `deliver_at`."""
    if deliver_at is not None:
        _refuse("delay", "must not be given together with deliver_at", "pass one of them")
    if isinstance(delay, str) and delay in DELAY_LEVELS:
        return DELAY_LEVELS[delay]
    if not isinstance(delay, timedelta) or not timedelta(0) <= delay <= MAX_DELAY:
        limit = f"must be a timedelta from 0 to {MAX_DELAY.days} days, or one of {' '.join(DELAY_LEVELS)}"
        _refuse("delay", limit, "pass timedelta(minutes=30), say")
    return delay


def require_window(name: str, window: object) -> None:
    """Refuse a length of time that is no timedelta above 0 and up to `MAX_DELAY`; the error begins with `name`."""
    if not isinstance(window, timedelta) or not timedelta(0) < window <= MAX_DELAY:
        raise ValueError(f"{name} must be a timedelta above 0, of at most {MAX_DELAY.days} days, not {window!r:.40}")


def require_wait(name: str, wait: object) -> None:
    """Refuse a length of time that is no timedelta from 0 to `MAX_DELAY`; the error begins with `name`."""
    if not isinstance(wait, timedelta) or not timedelta(0) <= wait <= MAX_DELAY:
        raise ValueError(f"{name} must be a timedelta from 0 to {MAX_DELAY.days} days, not {wait!r:.40}")


def require_notes(**notes: str | None) -> None:
    """Refuse a text of a person that cannot be stored or looked for; by the name of the argument. None: no text."""
    for field, note in notes.items():
        if note is not None and ("\0" in _text(field, note) or len(note) > MAX_NOTE):
            _refuse(field, f"must be at most {MAX_NOTE} characters without NUL", "shorten or clean it")


def require_numbers(**numbers: object) -> None:
    """Refuse a value that is no whole number from 1 to `MAX_NUMBER`; by the name of the argument."""
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_NUMBER:
            range = f"from 1 to {MAX_NUMBER}" if isinstance(number, int) and number > MAX_NUMBER else "from 1 on"
            raise ValueError(f"{name} must be a whole number {range}, not {number!r:.40}")


def require_flags(**flags: object) -> None:
    """Refuse a value that is neither True nor False, because every text counts as true; by the name of the argument."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, not {flag!r:.40}")
