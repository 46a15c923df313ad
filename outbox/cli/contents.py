"""Messages as the command line shows them: all that they carry, for people and for programs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

import click

from outbox.cli.output import counted, moment, printable
from outbox.errors import InvalidMessageError

if TYPE_CHECKING:
    from outbox.model.message import Message

_SHOWN_BODY = 2_000


def contents(message: Message, *, without: str = "") -> dict[str, object]:
    """Return what a message carries, but for the header `without`; its body as text, or as base64 if it is no text."""
    carried: dict[str, object] = {
        "tags": message.tags,
        "headers": _headers(message, without),
        "content_type": message.content_type,
        "deliver_at": message.deliver_at,
        "expires_at": message.expires_at,
    }
    try:
        return {**carried, "body": message.body.decode()}
    except UnicodeDecodeError:
        return {**carried, "body_base64": base64.b64encode(message.body).decode()}


def show_fields(fields: Mapping[str, object]) -> None:
    """Write one field a line; leave out those that are None."""
    for name, value in fields.items():
        if value is not None:
            shown = moment(value) if isinstance(value, datetime) else printable(value)
            click.echo(f"{name.replace('_', ' '):12} {shown}")


def show_contents(message: Message, *, without: str = "") -> None:
    """Write what a message carries, one field a line, without the header `without`, and the beginning of its body."""
    carried = contents(message, without=without)
    body = str(carried.pop("body", None) or carried.pop("body_base64", ""))
    headers = carried["headers"]
    if isinstance(headers, dict):
        del carried["headers"]
    show_fields(carried)
    for name, value in headers.items() if isinstance(headers, dict) else ():
        click.echo(f"{'header':12} {printable(name)}: {printable(value)}")
    cut = "" if len(body) <= _SHOWN_BODY else f" (the first {_SHOWN_BODY} characters; --json shows all)"
    click.echo(f"{'body':12} {counted(len(message.body), 'byte')}{cut}")
    click.echo("\n".join(map(printable, body[:_SHOWN_BODY].split("\n"))))


def _headers(message: Message, without: str) -> dict[str, str] | str | None:
    """Return the headers by name; or the text as it is stored, if a row holds something else than headers."""
    from outbox.senders.headers import own_headers

    try:
        return {name: value for name, value in own_headers(message).items() if name != without}
    except InvalidMessageError:
        return message.headers_json
