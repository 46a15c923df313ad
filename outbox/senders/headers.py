"""Text headers: the fields of a message on the way, and the message that a consumer makes of them.

    Outbox-Key          the key, UTF-8 and percent-encoded, because a key may hold any character
    Outbox-Tags         the tags, encoded in the same way
    Outbox-Created-At   when the message was written: ISO 8601, UTC, by the clock of the database
    Content-Type        as in the message

The user's own headers travel under their own names. An empty field is not sent. The message id has the name that the
destination reads for deduplication, or else `Outbox-Id`. A destination with another place for the key needs no header
for the key. Nothing changes between two attempts: a copy is the same bytes.

`Message` checks headers before a row is written. A row inserted by SQL may hold anything, so headers are checked here
again. A header must neither look like a field of the outbox nor give instructions to the destination.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from json.scanner import make_scanner
from typing import NoReturn
from urllib.parse import quote, unquote
from uuid import UUID

from outbox.errors import InvalidMessageError
from outbox.model.limits import checked_headers, stored_headers
from outbox.model.message import Message

ID = "Outbox-Id"
KEY = "Outbox-Key"
TAGS = "Outbox-Tags"
CREATED_AT = "Outbox-Created-At"
CONTENT_TYPE = "Content-Type"
#: For a destination that does not tell a consumer the topic.
TOPIC = "Outbox-Topic"

#: For those who find the message among the dead letters.
FIX = "send the message anew without that, and discard this one"

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_NO_LINE = re.compile("[\r\n\ud800-\udfff]")
_LINE = "must be one line of UTF-8"
_STAYS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~"
_scan = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]  # the stubs name another class


# Compared by identity, which is a quicker key of a cache.
@dataclass(frozen=True, slots=True, eq=False)
class Reserved:
    """Names that no header of a row may have, because `by` obeys or writes such headers.

    `prefixes` and `names` are in lower case; names are compared without regard to case, as many clients do.
    """

    by: str
    prefixes: tuple[str, ...]
    names: tuple[str, ...] = ()

    def holds(self, name: str) -> bool:
        """Return whether a name is reserved."""
        lower = name.lower()
        return lower.startswith(self.prefixes) or lower in self.names


_OURS = Reserved("the outbox", prefixes=("outbox-",), names=(CONTENT_TYPE.lower(),))


#: For a destination that neither reads nor writes headers itself.
NOTHING_RESERVED = Reserved("nobody", prefixes=())


def wire_headers(
    message: Message, *, id_name: str = ID, reserved: Reserved = NOTHING_RESERVED, keyed: bool = True
) -> dict[str, str]:
    """Return the headers of a message, the id under `id_name`; `keyed`: with the key.

    Raises:
        InvalidMessageError: no destination could carry the headers of the row, or a name is `reserved`.
    """
    stored = message.headers_json
    headers = {} if stored is None else _checked_headers(message, stored, reserved)
    # Set last, so that no header of the row can replace them.
    headers[id_name] = message.id_text
    if keyed and message.key is not None:
        headers[KEY] = _quoted(message.key)
    if message.tags is not None:
        headers[TAGS] = _quoted(message.tags)
    created_at = message.created_at_text
    if created_at is not None:
        headers[CREATED_AT] = created_at
    content_type = message.content_type
    if content_type is not None:
        if not _is_line(content_type):
            _refuse("content_type", _LINE)
        headers[CONTENT_TYPE] = content_type
    return headers


def own_headers(message: Message) -> dict[str, str]:
    """Return the user's headers, as stored; raise `InvalidMessageError` for anything but a JSON object of strings."""
    stored = message.headers_json
    if stored is None:
        return {}
    try:
        # Our writers write no white space at the ends, which `json.loads` searches for.
        headers, end = _scan(stored, 0) if stored.startswith("{") else (None, -1)
        if end != len(stored):
            headers = json.loads(stored)
    except (ValueError, RecursionError, StopIteration):
        headers = None
    if not isinstance(headers, dict):
        _refuse("headers", f"must be a JSON object of strings, not {stored!r:.60}")
    for name, value in headers.items():
        if not isinstance(value, str):
            _refuse(_named(name), f"must be a string, not {type(value).__name__}")
    return headers


def read_headers(topic: str, body: bytes, headers: Mapping[str, str], *, id_name: str = ID) -> Message:
    """Return the message that a consumer received; the opposite of `wire_headers`.

    Headers that no outbox writes are left out: brokers and bridges add some on the way.

    Raises:
        KeyError: there is no `id_name`, so no outbox has written the message.
        InvalidMessageError: a field breaks a limit, so no outbox has written the message.
    """
    key, tags, created_at = headers.get(KEY), headers.get(TAGS), headers.get(CREATED_AT)
    message = Message(
        topic,
        body,
        key=None if key is None else unquote(key, errors="strict"),
        tags=None if tags is None else unquote(tags, errors="strict"),
        content_type=headers.get(CONTENT_TYPE),
    )
    message.message_id = UUID(headers[id_name])
    message.created_at = None if created_at is None else datetime.fromisoformat(created_at)
    own = {name: value for name, value in headers.items() if name != id_name and _is_for_users(name, value)}
    # Their number is not checked, because brokers may have added some of them.
    stored = stored_headers(own) if own else None
    return message.sent_as(topic, headers_json=stored, body=body, content_type=message.content_type)


def _is_for_users(name: str, value: str) -> bool:
    """Return whether a user may have given a header. The names of the fields above are refused to users."""
    try:
        checked_headers({name: value})
    except InvalidMessageError:
        return False
    return True


def _checked_headers(message: Message, stored: str, reserved: Reserved) -> dict[str, str]:
    """Return the user's headers; refuse headers that no destination could carry, and reserved names."""
    headers = own_headers(message)
    # Without a backslash JSON holds no control character, so every value is one line.
    if stored.isascii() and "\\" not in stored:
        for name in headers:
            _check_name(name, reserved)
    else:
        for name, value in headers.items():
            _check_name(name, reserved)
            if not _is_line(value):
                _refuse(_named(name), _LINE)
    return headers


def _quoted(text: str) -> str:
    """Do as `quote`, which takes longer for a text without anything to encode."""
    return quote(text, safe="") if text.encode().strip(_STAYS) else text


# An application has few names for very many headers.
@lru_cache(maxsize=1024)
def _check_name(name: str, reserved: Reserved) -> None:
    if not _TOKEN.fullmatch(name):
        _refuse(_named(name), "the name must be of letters, digits and -")
    for each in (_OURS, reserved):
        if each.holds(name):
            _refuse(_named(name), f"the name is reserved by {each.by}")


def _is_line(text: str) -> bool:
    return (text.isascii() and text.isprintable()) or not _NO_LINE.search(text)


def _named(name: str) -> str:
    return f"headers[{name!r:.80}]"


def _refuse(field: str, limit: str) -> NoReturn:
    raise InvalidMessageError(field, limit, FIX)
