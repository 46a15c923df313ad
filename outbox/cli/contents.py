"""The fields of a message or a transaction, for people and for programs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import datetime

import click

from outbox.cli.output import counted, moment, printable
from outbox.errors import InvalidMessageError
from outbox.model.message import Message
from outbox.senders.headers import own_headers

#: So many bytes of each body are in a list: twenty messages of 4 MiB would be 80 MiB.
LISTED_BYTES = 64 * 1024
#: Characters of a body that a terminal gets.
_SHOWN_BODY = 2_000


def show_fields(fields: Mapping[str, object]) -> None:
    """Write a field a line; leave out fields without a value."""
    for name, value in fields.items():
        if value is not None:
            shown = moment(value) if isinstance(value, datetime) else value
            shown = ", ".join(shown) if isinstance(shown, tuple) else shown
            click.echo(f"{name.replace('_', ' '):12} {printable(shown)}")


def contents_of(message: Message, *, without: str = "", most: int | None = None) -> dict[str, object]:
    """Return the contents of a message, except the header `without`; a body that is no text as base64.

    `most`: so many bytes of the body at most; None: all. The size of the whole body is told in any case.
    """
    contents: dict[str, object] = {
        "tags": message.tags,
        "headers": _headers(message, without),
        "content_type": message.content_type,
        "deliver_at": message.deliver_at,
        "expires_at": message.expires_at,
        "body_bytes": len(message.body),
    }
    part = message.body[:most]
    try:
        text = message.body.decode()
    except UnicodeDecodeError:
        return {**contents, "body_base64": base64.b64encode(part).decode()}
    # The cut may be inside of a character.
    return {**contents, "body": text if len(part) == len(message.body) else part.decode(errors="ignore")}


def _headers(message: Message, without: str) -> dict[str, str] | str | None:
    """Return the headers by name; or the stored text, if a row holds no headers there."""
    try:
        return {name: value for name, value in own_headers(message).items() if name != without}
    except InvalidMessageError:
        return message.headers_json


def show_contents(message: Message, *, without: str = "") -> None:
    """Write the contents of a message, a field a line, and the beginning of the body."""
    contents = contents_of(message, without=without)
    del contents["body_bytes"]
    form = " in base64" if "body_base64" in contents else ""
    body = str(contents.pop("body", None) or contents.pop("body_base64", ""))
    headers = contents["headers"]
    if isinstance(headers, dict):
        del contents["headers"]
    show_fields(contents)
    for name, value in headers.items() if isinstance(headers, dict) else ():
        click.echo(f"{'header':12} {printable(name)}: {printable(value)}")
    cut = "" if len(body) <= _SHOWN_BODY else f" (the first {_SHOWN_BODY} characters; --json shows all)"
    click.echo(f"{'body':12} {counted(len(message.body), 'byte')}{form}{cut}")
    click.echo("\n".join(map(printable, body[:_SHOWN_BODY].split("\n"))))
