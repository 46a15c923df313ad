"""Redaction: the visible part of a message."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from outbox.model.message import Message
from outbox.runtime.secret import is_secret_name, scrubbed

#: Returns the headers and the body of a message as people may see them.
Redact = Callable[[Message], tuple[Mapping[str, str], bytes]]
Keys = Literal["shown", "hashed"]

#: Headers that carry a login, whatever their names say.
_LOGINS = ("authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key")


def scrub(message: Message) -> tuple[Mapping[str, str], bytes]:
    """Return the headers without values that are secret by name or by form, and the body as it is."""
    return {name: _value(name, value) for name, value in message.headers.items()}, message.body


def clean(text: str) -> str:
    """Return a text of an error or a destination without likely secrets."""
    return scrubbed(text, ())


def cleaned(document: str) -> str:
    """Return a document of JSON whose texts are `clean`."""
    return json.dumps(_cleaned(json.loads(document)), separators=(",", ":"))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {name: _cleaned(each) for name, each in value.items()}
    return [_cleaned(each) for each in value] if isinstance(value, list) else value


def _value(name: str, value: str) -> str:
    return "…" if name.lower() in _LOGINS or is_secret_name(name) else clean(value)
