"""How a message's fields travel as text headers, and how a consumer gets the message back.

    Outbox-Key          the key, UTF-8 and percent-encoded, because a key may hold any character
    Outbox-Tags         the tags, encoded in the same way
    Outbox-Created-At   when the message was written: ISO 8601, UTC, by the clock of the database
    Content-Type        as it is

The user's own headers travel under their own names. A field that a message has not is not sent. The message id has
the name that the destination reads for its own deduplication, so each sender adds it. Nothing changes between two
attempts: a copy is the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, unquote
from uuid import UUID

from outbox.message import Message

KEY = "Outbox-Key"
TAGS = "Outbox-Tags"
CREATED_AT = "Outbox-Created-At"
CONTENT_TYPE = "Content-Type"
_OURS = frozenset((KEY, TAGS, CREATED_AT, CONTENT_TYPE))


def wire_headers(message: Message, *, id_name: str) -> dict[str, str]:
    """The headers of `message`; its id under `id_name`."""
    headers = {id_name: str(message.message_id)}
    if message.headers_json is not None:
        headers.update(message.headers)
    if message.key is not None:
        headers[KEY] = quote(message.key, safe="")
    if message.tags is not None:
        headers[TAGS] = quote(message.tags, safe="")
    if message.created_at is not None:
        headers[CREATED_AT] = message.created_at.astimezone(UTC).isoformat()
    if message.content_type is not None:
        headers[CONTENT_TYPE] = message.content_type
    return headers


def read_headers(topic: str, body: bytes, headers: Mapping[str, str], *, id_name: str) -> Message:
    """The message that a consumer received; the opposite of `wire_headers`.

    Raises:
        KeyError: there is no `id_name`, so it was not written by an outbox.
        InvalidMessageError: nor could it have been.
    """
    key, tags, created_at = headers.get(KEY), headers.get(TAGS), headers.get(CREATED_AT)
    message = Message(
        topic,
        body,
        key=None if key is None else unquote(key, errors="strict"),
        tags=None if tags is None else unquote(tags, errors="strict"),
        headers={name: value for name, value in headers.items() if name not in _OURS and name != id_name},
        content_type=headers.get(CONTENT_TYPE),
    )
    message.message_id = UUID(headers[id_name])
    message.created_at = None if created_at is None else datetime.fromisoformat(created_at)
    return message
