"""The formats of a webhook: which headers and which body a message has on its way.

raw                      the body as it is, the fields as headers (see `outbox.senders.headers`), among them
                         Outbox-Topic, and Outbox-Headers: the names of the user's own headers
cloudevents              CloudEvents 1.0, binary mode: the body as it is, the fields as ce- headers
cloudevents-structured   CloudEvents 1.0, structured mode: all in one JSON object

In each of them the id stands under `webhook-id`, and the user's own headers under their own names.

Nothing here uses a driver.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from outbox.errors import InvalidMessageError
from outbox.model.limits import checked_topic
from outbox.model.message import Message
from outbox.senders.cloud_events import STRUCTURED, binary_headers, structured_body
from outbox.senders.headers import CONTENT_TYPE, Reserved, own_headers, wire_headers
from outbox.senders.webhook_signature import ID

TOPIC = "Outbox-Topic"
#: Servers and proxies add headers of their own, so a receiver has to know which ones the message has.
OWN_HEADERS = "Outbox-Headers"

#: Headers that say where a request goes, who sends it, how long it is, and how its body is to be read.
RESERVED = Reserved(
    "HTTP",
    prefixes=("webhook-", "ce-", "proxy-", "x-forwarded-", "if-", "sec-", "accept-"),
    names=(
        "accept",
        "authorization",
        "connection",
        "content-encoding",
        "content-length",
        "content-range",
        "content-transfer-encoding",
        "cookie",
        "expect",
        "forwarded",
        "host",
        "keep-alive",
        "max-forwards",
        "range",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
        "via",
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
        "x-original-url",
        "x-real-ip",
        "x-rewrite-url",
    ),
)
#: The same, and what `headers` reserves, for names that become these where a server turns _ into -, as WSGI does.
_DISGUISED = Reserved("HTTP", prefixes=(*RESERVED.prefixes, "outbox-"), names=(*RESERVED.names, "content-type"))

_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_FIX = "send the message anew without that, and discard this one"


class Content(NamedTuple):
    """What a request carries of a message."""

    headers: Mapping[str, str]
    body: bytes


Format = Callable[[Message], Content]


def format_named(name: str, source: str) -> Format | None:
    """Return the format of that name, None if there is none. `source`: where CloudEvents say that they come from.

    A format raises `InvalidMessageError` or `UnicodeError` for a row that it cannot carry.
    """
    formats: dict[str, Format] = {
        "raw": _raw,
        "cloudevents": partial(_binary, source=source),
        "cloudevents-structured": partial(_structured, source=source),
    }
    return formats.get(name)


def header_bytes(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as HTTP carries them, their values in UTF-8.

    Raises:
        InvalidMessageError: HTTP has no place for a character of a value.
    """
    for name, value in headers.items():
        if not _VALUE.fullmatch(value) or value.strip(" \t") != value:
            limit = "must hold no control characters, and neither begin nor end with a blank"
            raise InvalidMessageError(f"headers[{name!r:.80}]", limit, _FIX)
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _raw(message: Message) -> Content:
    _check(message)
    headers = wire_headers(message, id_name=ID, reserved=RESERVED)
    headers[TOPIC] = message.topic
    if names := ",".join(own_headers(message)):
        headers[OWN_HEADERS] = names
    return Content(headers, message.body)


def _binary(message: Message, *, source: str) -> Content:
    return Content({**_own_and_id(message), **binary_headers(message, source=source)}, message.body)


def _structured(message: Message, *, source: str) -> Content:
    headers = {**_own_and_id(message), CONTENT_TYPE: STRUCTURED}
    return Content(headers, structured_body(message, source=source))


def _own_and_id(message: Message) -> dict[str, str]:
    _check(message)
    wire_headers(message, id_name=ID, reserved=RESERVED)  # raises for headers that no destination could carry
    return {**own_headers(message), ID: str(message.message_id)}


def _check(message: Message) -> None:
    """Raise for what a row of somebody else's may hold, and an endpoint would read as something else."""
    try:
        checked_topic(message.topic)
    except InvalidMessageError as error:
        fix = "send the message anew under another topic, and discard this one"
        raise InvalidMessageError("topic", error.limit, fix) from None
    own = own_headers(message)
    if len({name.lower() for name in own}) < len(own):
        raise InvalidMessageError("headers", "must not hold one name in two cases", _FIX)
    for name in own:
        if "_" in name and _DISGUISED.holds(name.replace("_", "-")):
            raise InvalidMessageError(f"headers[{name!r:.80}]", "servers read it as a reserved name", _FIX)
