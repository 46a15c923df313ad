"""Envelopes: forms of messages that consumers behind any kind of destination may expect.

raw           the message unchanged
cloudevents   a CloudEvents 1.0 event in structured mode: one JSON object with all fields is the body
debezium      the form of Debezium's outbox event router: header `id`, topic `outbox.event.<topic>`, and the header
              `eventType` of its documentation; key and body unchanged

See https://github.com/cloudevents/spec for the attributes and the JSON event format, and
https://debezium.io/documentation/reference/stable/transformations/outbox-event-router.html for the router's defaults.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from datetime import UTC
from typing import Literal, NoReturn

from outbox.errors import InvalidMessageError
from outbox.model.limits import stored_headers
from outbox.model.message import Message
from outbox.senders.headers import FIX, own_headers

EnvelopeName = Literal["raw", "cloudevents", "debezium"]
#: Puts a message into its envelope, and addresses it to the topic.
Envelope = Callable[[Message, str], Message]

#: The router's `route.topic.replacement` is `outbox.event.${routedByValue}`.
DEBEZIUM_PREFIX = "outbox.event."
#: The attribute `source` of events.
_SOURCE = "/outbox"
_EVENT_TYPE = "application/cloudevents+json"
_DATA_CONTENT_TYPE = "datacontenttype"
_DEBEZIUM_NAMES = ("id", "eventtype")

#: Characters that no attribute may hold: control characters, lone surrogates and noncharacters of Unicode.
_FORBIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(0, 0x110000, 0x10000))
    + "]"
)
_JSON_TYPE = re.compile(r"[^/;\s]+/([^;\s]+\+)?json\s*(;.*)?", re.IGNORECASE)
_TEXT_TYPE = re.compile(r"""text/[^;\s]+\s*(;\s*charset\s*=\s*"?utf-?8"?\s*)?""", re.IGNORECASE)


def _raw(message: Message, topic: str) -> Message:
    if topic == message.topic:
        return message
    return message.sent_as(
        topic, headers_json=message.headers_json, body=message.body, content_type=message.content_type
    )


def _cloudevents(message: Message, topic: str) -> Message:
    if message.is_tombstone:
        # An event about nothing would not delete anything.
        return _raw(message, topic)
    # The type stays the message's own topic: it says what happened, and not where that is sent.
    attributes = _attributes(message)
    opening = json.dumps(attributes, separators=(",", ":"))[:-1].encode()
    data = _data(message.body, attributes.get(_DATA_CONTENT_TYPE)) if message.body else b""
    body = b"%b%b}" % (opening, data)
    return message.sent_as(topic, headers_json=message.headers_json, body=body, content_type=_EVENT_TYPE)


def _debezium(message: Message, topic: str) -> Message:
    # Set last, and in any case, so that no header of the row can replace them.
    own = own_headers(message)
    headers = {name: value for name, value in own.items() if name.lower() not in _DEBEZIUM_NAMES}
    headers["id"] = message.id_text
    if message.tags is not None:
        headers["eventType"] = message.tags
    return message.sent_as(
        topic, headers_json=stored_headers(headers), body=message.body, content_type=message.content_type
    )


def _attributes(message: Message) -> dict[str, str]:
    """Return the attributes of an event; empty fields are left out."""
    created_at = message.created_at
    given = {
        "specversion": "1.0",
        "id": str(message.message_id),
        "source": _SOURCE,
        "type": message.topic,
        "subject": message.key,
        "time": None if created_at is None else f"{created_at.astimezone(UTC).replace(tzinfo=None).isoformat()}Z",
        _DATA_CONTENT_TYPE: message.content_type,
        "tags": message.tags,
    }
    attributes = {name: value for name, value in given.items() if value is not None}
    for field, name in (("key", "subject"), ("tags", "tags"), ("content_type", _DATA_CONTENT_TYPE)):
        value = attributes.get(name)
        if value == "":
            _refuse(field, f"CloudEvents have no empty {name}")
        if value is not None and _FORBIDDEN.search(value):
            _refuse(field, f"CloudEvents allow no control characters in {name}")
    return attributes


def _data(body: bytes, content_type: str | None) -> bytes:
    """Return the member of the object for the body, with a comma before.

    JSON and text stand under `data`, JSON exactly as written. Other bodies stand under `data_base64`.
    """
    if content_type is not None and _JSON_TYPE.fullmatch(content_type) and _is_json(body):
        return b',"data":%b' % body
    if content_type is not None and _TEXT_TYPE.fullmatch(content_type):
        try:
            return b',"data":%b' % json.dumps(body.decode()).encode()
        except UnicodeDecodeError:
            pass  # it says that it is text, and is none: its bytes arrive all the same
    return b',"data_base64":"%b"' % base64.b64encode(body)


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _refuse(field: str, limit: str) -> NoReturn:
    raise InvalidMessageError(field, limit, FIX)


ENVELOPES: dict[EnvelopeName, Envelope] = {"raw": _raw, "cloudevents": _cloudevents, "debezium": _debezium}
