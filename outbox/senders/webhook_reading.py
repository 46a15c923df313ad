"""For endpoints that receive webhooks of an outbox: the check of the signature, and the message.

No driver is used, so that a service that only receives needs no extra.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from outbox.errors import SignatureError
from outbox.model.message import Message
from outbox.senders.headers import CONTENT_TYPE, CREATED_AT, KEY, TAGS, TOPIC, read_headers
from outbox.senders.webhook_format import OWN_HEADERS
from outbox.senders.webhook_signature import ID, SIGNATURE, TIMESTAMP, keys_of, signature_of

_SECONDS = re.compile(r"[0-9]{1,12}")


def verify(
    headers: Mapping[str, str],
    body: bytes,
    secret: str,
    *,
    tolerance: timedelta = timedelta(minutes=5),
    clock: Callable[[], float] = time.time,
) -> None:
    """Return if the request was signed with the secret, at most `tolerance` ago (or ahead, where clocks differ).

    Args:
        headers: those of the request, names in any case.
        body: the bytes as received, before any parsing.
        secret: `whsec_` and base64. Of several secrets, one in a line, a single match is enough.
        tolerance: the allowed difference between the time of the request and ours.
        clock: returns the seconds since 1970.

    Raises:
        SignatureError: the signature is wrong, or too old. Answer 401: the sender then waits, and reports that.
        ValueError: the secret is malformed.
    """
    keys = keys_of(secret)
    given = {name.lower(): value for name, value in headers.items()}
    for name in (ID, TIMESTAMP, SIGNATURE):
        if not given.get(name):
            raise SignatureError(f"the request has no header {name}")
    timestamp = given[TIMESTAMP]
    if not _SECONDS.fullmatch(timestamp):
        raise SignatureError(f"the header {TIMESTAMP} must hold seconds since 1970")
    expected = [signature_of(key, given[ID], timestamp, body).encode() for key in keys]
    signatures = [signature.encode(errors="replace") for signature in given[SIGNATURE].split()]
    # All are compared, each in constant time, so that the time tells nothing of the right signature.
    equal = [hmac.compare_digest(signature, each) for signature in signatures for each in expected]
    if not any(equal):
        raise SignatureError("the request was not signed with this secret, or was altered on its way")
    if abs(clock() - int(timestamp)) > tolerance.total_seconds():
        raise SignatureError(f"the request was signed more than {tolerance.total_seconds():g} s from now")


def read_message(headers: Mapping[str, str], body: bytes) -> Message:
    """Return the message that an endpoint received, without its place in the log.

    Args:
        headers: of the request, names in any case; foreign headers do not matter.
        body: the bytes as received.

    Raises:
        KeyError: a header of the outbox is missing, so no outbox has sent the request.
        ValueError: a header has a value that no outbox writes (also as `InvalidMessageError`).
    """
    given = {name.lower(): _as_utf8(value) for name, value in headers.items()}
    names = given[OWN_HEADERS.lower()].split(",") if OWN_HEADERS.lower() in given else []
    # A proxy may have dropped some of them.
    found = {name: given[name.lower()] for name in names if name.lower() in given}
    fields = (ID, KEY, TAGS, CREATED_AT, CONTENT_TYPE)
    # Some frameworks have an empty content type where there is none.
    found |= {name: given[name.lower()] for name in fields if given.get(name.lower())}
    return read_headers(given[TOPIC.lower()], body, found, id_name=ID)


def _as_utf8(value: str) -> str:
    """Return a value as sent. Most frameworks decode the bytes of a header as Latin-1, some as UTF-8."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value
