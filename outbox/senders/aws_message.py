"""A message of SQS or SNS: its text and its attributes, and the message that a consumer makes of them.

The text is the body, where the body is UTF-8 of the characters that SQS takes; else Base64 of the body. The attribute
`outbox` is a JSON object with the names of `outbox.senders.headers`, the user's headers and `Outbox-Topic`: SQS takes
only ten attributes. `Outbox-Encoding` says how to read the text. The tags are also an attribute of their own, for the
filters of SNS subscriptions. No driver is used, so that a service that only receives needs no extra.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from outbox.model.message import Message
from outbox.senders.headers import TAGS, TOPIC, read_headers, wire_headers

ATTRIBUTE = "outbox"
#: `base64`, or `empty` for a body of no bytes, since SQS takes no empty text.
ENCODING = "Outbox-Encoding"

_EMPTY = "empty"
#: The characters of XML 1.0.
_TEXT = re.compile("[\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+")
#: Letters, digits and punctuation of ASCII.
_GROUP = re.compile(r"[!-~]{1,128}")


def text_of(message: Message) -> tuple[str, dict[str, str]]:
    """Return the text and the attributes of a message; raise `InvalidMessageError` for a row with unfit headers."""
    headers = wire_headers(message)
    headers[TOPIC] = message.topic
    text, encoding = _encoded(message.body)
    if encoding is not None:
        headers[ENCODING] = encoding
    attributes = {ATTRIBUTE: json.dumps(headers, separators=(",", ":"))}
    if tags := headers.get(TAGS):
        attributes[TAGS] = tags
    return text, attributes


def group_of(message: Message) -> str:
    """Return the group of a message in a FIFO queue: the key; SHA-256 of a key unfit for SQS; the id without a key."""
    key = message.key
    if key is None:
        return message.id_text
    return key if _GROUP.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()


def read_message(received: Mapping[str, Any]) -> Message:
    """Return the message that a consumer received, without its place in the log.

    Args:
        received: a message of SQS as boto3 returns it (from SNS with or without raw delivery), a record of SQS in an
            event of Lambda, or a notification of SNS. Ask SQS for the attribute: `MessageAttributeNames=["outbox"]`.

    Raises:
        KeyError: the attribute `outbox` is missing, so no outbox has written the message, or SQS was not asked for it.
        ValueError: the attribute or the text holds what no outbox writes (also as `InvalidMessageError`).
    """
    text: str = _either(received, "Body", "body", "Message")
    attributes = received.get("MessageAttributes") or received.get("messageAttributes") or {}
    if ATTRIBUTE not in attributes and "Message" not in received and "TopicArn" in (notification := _object(text)):
        return read_message(notification)
    headers = _object(_either(attributes[ATTRIBUTE], "StringValue", "stringValue", "Value"))
    topic, encoding = headers.pop(TOPIC), headers.pop(ENCODING, None)
    return read_headers(topic, _decoded(text, encoding), headers)


def _encoded(body: bytes) -> tuple[str, str | None]:
    if not body:
        return _EMPTY, _EMPTY
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    return (text, None) if _TEXT.fullmatch(text) else (base64.b64encode(body).decode(), "base64")


def _decoded(text: str, encoding: str | None) -> bytes:
    if encoding is None:
        return text.encode()
    return b"" if encoding == _EMPTY else base64.b64decode(text, validate=True)


def _either(found: Mapping[str, Any], *names: str) -> Any:
    """Return the first field that is there; raise `KeyError` without any."""
    return found[next((name for name in names if name in found), names[0])]


def _object(text: str) -> dict[str, Any]:
    """Return a JSON object; an empty dict for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
