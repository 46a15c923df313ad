"""Conversion of messages: from the protocol's form to a message of the log, and back.

What a client gives besides topic, body, tag and message group is in headers of the log's message, by RocketMQ's names:
a relay sends those headers, and filters read the properties.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from outbox.model.limits import HeaderRoom, checked_headers, checked_tags
from outbox.model.message import Message, stored_message
from outbox.model.trace_context import TRACE_HEADERS
from outbox.rocketmq.front.protocol import Wire, kind, moment_of, numbers, set_moment

ID, KEYS = "UNIQ_KEY", "KEYS"
BORN_AT, BORN_HOST = "BORN_TIMESTAMP", "BORN_HOST"
SHARDING_KEY = "__SHARDINGKEY"
#: Properties of a client that no header can have: odd names, white space at an end, or too many for the log.
OTHERS = "rocketmq-properties"
ENCODING, TRACE = "content-encoding", "traceparent"
_OURS = frozenset({ID, KEYS, BORN_AT, BORN_HOST, OTHERS, ENCODING, TRACE})

_Message = kind("Message")
_TYPES, _ENCODINGS = numbers("MessageType"), numbers("Encoding")
_MD5 = numbers("DigestType")["MD5"]
#: Ids of messages in the log are in this name space.
_IDS = uuid.UUID("6f1d7c1e-0b7a-5c53-9a43-2b9a4f6d5e10")
#: An id of RocketMQ begins with its version.
_VERSION = "01"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
#: Ends of lines in Unicode, which JSON may have in a text and a header may not.
_SEPARATORS = {0x2028: r"\u2028", 0x2029: r"\u2029"}


def stored(wire: Wire) -> Message:
    """Return the message of the log for a checked message of a client.

    Raises:
        InvalidMessageError: the log has a limit that RocketMQ has not.
    """
    system = wire.system_properties
    return stored_message((
        None, _log_id(wire), wire.topic.name, system.message_group or None,
        checked_tags(system.tag) if system.tag else None, checked_headers(_headers(wire)), wire.body, None, None,
        _deliver_at(system), None,
    ))  # fmt: skip


def _log_id(wire: Wire) -> uuid.UUID:
    """Return the id in the log: the same for a message that is sent again, another for a message of other content.

    Clients make ids of machine, process and second, so ids of two clients may be equal. What a client sets anew at each
    try does not count: moment of birth, host and trace.
    """
    system = wire.system_properties
    due = system.delivery_timestamp
    properties = {name: value for name, value in wire.user_properties.items() if name.lower() not in TRACE_HEADERS}
    told = [
        system.message_id, wire.topic.name, system.message_group, system.tag, sorted(system.keys), properties,
        system.body_encoding, system.HasField("delivery_timestamp"), due.seconds, due.nanos,
    ]  # fmt: skip
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    digest.update(wire.body)
    return uuid.uuid5(_IDS, digest.hexdigest())


def _deliver_at(system: Wire) -> datetime | None:
    if not system.HasField("delivery_timestamp"):
        return None
    return max(_EPOCH + _MILLISECOND, moment_of(system.delivery_timestamp))


def _headers(wire: Wire) -> dict[str, str]:
    """Return the headers: those of the system, and as many properties of the client as headers can have."""
    system = wire.system_properties
    headers = {ID: system.message_id}
    keys = _keys(" ".join(system.keys))
    if keys:
        headers[KEYS] = " ".join(keys)
    if system.HasField("born_timestamp"):
        headers[BORN_AT] = str(system.born_timestamp.seconds * 1000 + system.born_timestamp.nanos // 1_000_000)
    if system.body_encoding == _ENCODINGS["GZIP"]:
        headers[ENCODING] = "gzip"
    others, room = {}, HeaderRoom(headers)
    taken = {name.lower() for name in _OURS}
    for name, value in wire.user_properties.items():
        if name.lower() not in taken and room.takes(name, value):
            headers[name] = value
            taken.add(name.lower())
        else:
            others[name] = value
    if others:
        headers[OTHERS] = json.dumps(others, ensure_ascii=False, separators=(",", ":")).translate(_SEPARATORS)
    room, last = HeaderRoom(headers), ((BORN_HOST, system.born_host), (TRACE, system.trace_context))
    return headers | {name: value for name, value in last if value and room.takes(name, value)}


def id_of(message: Message) -> str:
    """Return the id of a message for clients; a message that no client has sent has one made of its id in the log."""
    return _headers_of(message).get(ID) or made_id_of(message)


def made_id_of(message: Message) -> str:
    """Return an id of RocketMQ's form, made of the id in the log."""
    return f"{_VERSION}{message.message_id.hex.upper()}"


def wire_of(message: Message, type_: str) -> Wire:
    """Return a message of the log in the form for clients. `type_`: the type of its topic."""
    headers = _headers_of(message)
    wire = _Message(body=message.body)
    wire.topic.name = message.topic
    wire.user_properties.update(_properties(message, headers))
    system = wire.system_properties
    system.message_id = headers.get(ID) or made_id_of(message)
    system.message_type = _TYPES[type_]
    system.body_encoding = _ENCODINGS["GZIP" if headers.get(ENCODING) == "gzip" else "IDENTITY"]
    system.body_digest.type = _MD5
    system.body_digest.checksum = hashlib.md5(message.body, usedforsecurity=False).hexdigest().upper()
    system.born_host = headers.get(BORN_HOST, "")
    set_moment(system.born_timestamp, _born_at(message, headers))
    system.keys.extend(_keys(headers.get(KEYS, "")))
    system.delivery_attempt = message.attempt
    if message.tags is not None:
        system.tag = message.tags
    if message.key is not None:
        system.message_group = message.key
    if message.deliver_at is not None:
        set_moment(system.delivery_timestamp, message.deliver_at)
    if TRACE in headers:
        system.trace_context = headers[TRACE]
    return wire


def _properties(message: Message, headers: Mapping[str, str]) -> dict[str, str]:
    properties = {name: value for name, value in headers.items() if name not in _OURS}
    properties |= _texts(headers.get(OTHERS, "{}"))
    return properties if message.key is None else properties | {SHARDING_KEY: message.key}


def _keys(header: str) -> list[str]:
    """Return the keys in a header. As in RocketMQ, a blank parts two keys, and no other white space does."""
    return [key for key in header.split(" ") if key]


def _headers_of(message: Message) -> dict[str, str]:
    return _texts(message.headers_json or "{}")


def _texts(stored: str) -> dict[str, str]:
    """Return the texts by name in stored JSON, in which other writers may have anything."""
    try:
        found = json.loads(stored)
    except (ValueError, RecursionError):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in items if _is_sendable(name) and _is_sendable(value)}


def _is_sendable(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # JSON may have half of a character
        return False


def _born_at(message: Message, headers: Mapping[str, str]) -> datetime:
    """Return the moment at which the client made the message, if it gave a moment; else that of the insert."""
    try:
        return _EPOCH + int(headers.get(BORN_AT, "")) * _MILLISECOND
    except (ValueError, OverflowError):
        return message.created_at or _EPOCH
