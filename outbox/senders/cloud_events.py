"""Messages as CloudEvents 1.0: the attributes, and how HTTP carries them in binary and in structured mode.

    id                the message's id
    source            as the user has said
    type              the topic
    subject           the key
    time              when the message was written: RFC 3339, UTC
    datacontenttype   the content type
    tags              the tags, as an extension attribute

A field that a message has not is left out. See https://github.com/cloudevents/spec, the HTTP protocol binding and the
JSON event format. Nothing here uses a driver.
"""

from __future__ import annotations

import base64
import json
import re
from datetime import UTC
from typing import NoReturn
from urllib.parse import quote

from outbox.errors import InvalidMessageError
from outbox.model.message import Message

_DATA_CONTENT_TYPE = "datacontenttype"

#: Characters that no attribute may hold: control characters, lone surrogates and noncharacters of Unicode.
_FORBIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(0, 0x110000, 0x10000))
    + "]"
)
#: Every other character is percent-encoded in a header: the blank, ", % and what is not ASCII.
_AS_THEY_ARE = "!#$&'()*+,/:;<=>?@[\\]^`{|}"

_ENVELOPE = "application/cloudevents"
#: The content type of structured mode.
STRUCTURED = f"{_ENVELOPE}+json"
_JSON_TYPE = re.compile(r"[^/;\s]+/([^;\s]+\+)?json\s*(;.*)?", re.IGNORECASE)
_TEXT_TYPE = re.compile(r"""text/[^;\s]+\s*(;\s*charset\s*=\s*"?utf-?8"?\s*)?""", re.IGNORECASE)


def binary_headers(message: Message, *, source: str) -> dict[str, str]:
    """Return the headers of binary mode, where the body of the request is the body of the message.

    Raises:
        InvalidMessageError: CloudEvents cannot carry a field.
    """
    attributes = _attributes(message, source)
    content_type = attributes.pop(_DATA_CONTENT_TYPE, None)
    if content_type is not None and content_type.lower().startswith(_ENVELOPE):
        # Receivers tell the modes apart by the content type.
        limit = f"{content_type:.80} says that the body is a whole CloudEvent"
        _refuse("content_type", limit, "send it to an endpoint with format=raw, and discard this one")
    headers = {f"ce-{name}": quote(value, safe=_AS_THEY_ARE) for name, value in attributes.items()}
    return headers if content_type is None else {**headers, "Content-Type": content_type}


def structured_body(message: Message, *, source: str) -> bytes:
    """Return the JSON object of structured mode.

    JSON and text stand under `data`, JSON exactly as it was written. Other bodies stand under `data_base64`.

    Raises:
        InvalidMessageError: CloudEvents cannot carry a field.
    """
    attributes = _attributes(message, source)
    opening = json.dumps(attributes, separators=(",", ":"))[:-1].encode()
    data = _data(message.body, attributes.get(_DATA_CONTENT_TYPE)) if message.body else b""
    return b"%b%b}" % (opening, data)


def _attributes(message: Message, source: str) -> dict[str, str]:
    created_at = message.created_at
    given = {
        "specversion": "1.0",
        "id": str(message.message_id),
        "source": source,
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
    """Return the member of the object that holds the body, with the comma before it."""
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


def _refuse(field: str, limit: str, fix: str = "send the message anew without that, and discard this one") -> NoReturn:
    raise InvalidMessageError(field, limit, fix)
