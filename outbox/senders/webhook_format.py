"""A webhook on the way: the body unchanged, and the fields as headers (see `outbox.senders.headers`).

Further headers are Outbox-Topic, and Outbox-Headers: the names of the user's own headers. The id stands under
`webhook-id`. No driver is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from outbox.errors import InvalidMessageError
from outbox.model.limits import checked_topic
from outbox.model.message import Message
from outbox.senders.headers import FIX, TOPIC, Reserved, own_headers, wire_headers
from outbox.senders.webhook_signature import ID

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


def wire_headers_of(message: Message) -> dict[str, str]:
    """Return the headers with the fields of a message; raise if HTTP cannot carry the row."""
    own = _checked_headers(message)
    headers = wire_headers(message, id_name=ID, reserved=RESERVED)
    headers[TOPIC] = message.topic
    if names := ",".join(own):
        headers[OWN_HEADERS] = names
    return headers


def header_bytes(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers for HTTP, in UTF-8; raise `InvalidMessageError` for a character without a place there."""
    for name, value in headers.items():
        # What is printable holds no control character; the expression only has to look at the few others.
        if not (value.isprintable() or _VALUE.fullmatch(value)) or value.strip(" \t") != value:
            limit = "must hold no control characters, and neither begin nor end with a blank"
            raise InvalidMessageError(f"headers[{name!r:.80}]", limit, FIX)
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _checked_headers(message: Message) -> dict[str, str]:
    """Return the user's headers; refuse headers of a foreign row that endpoints read differently."""
    try:
        checked_topic(message.topic)
    except InvalidMessageError as error:
        fix = "send the message anew under another topic, and discard this one"
        raise InvalidMessageError("topic", error.limit, fix) from None
    own = own_headers(message)
    if len({name.lower() for name in own}) < len(own):
        raise InvalidMessageError("headers", "must not hold one name in two cases", FIX)
    for name in own:
        if "_" in name and _DISGUISED.holds(name.replace("_", "-")):
            raise InvalidMessageError(f"headers[{name!r:.80}]", "servers read it as a reserved name", FIX)
    return own
