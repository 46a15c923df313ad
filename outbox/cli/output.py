"""What people and programs read: plain text, tables, JSON. Nothing from a database reaches a terminal unescaped."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, quote_plus

import click

from outbox.runtime import text

age, counted = text.age, text.counted

#: Of the shapes that docs/json.md describes. Fields may be added; one that goes, or means something else, raises it.
JSON_VERSION = 1

_secrets: set[str] = set()
_SHORTEST_SECRET = 4
_CREDENTIALS = re.compile(r"(?<=//)[^\s'\"]*@")
_PASSWORD = re.compile(r"(?i)\b((?:ssl)?password|passwd|pwd|token|secret)=[^\s&'\"]*")


def keep_secret(*secrets: str | None) -> None:
    """Never show these, in whatever text they come along."""
    for secret in secrets:
        if secret and len(secret) >= _SHORTEST_SECRET:
            _secrets.update({secret, quote(secret, safe=""), quote_plus(secret)})


def scrubbed(text: str) -> str:
    """A text without the secrets that are known, and without what looks like one."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "…")
    return _PASSWORD.sub(r"\1=…", _CREDENTIALS.sub("…@", text))


def printable(value: object) -> str:
    """A text without control characters: they are shown as escapes."""
    text = "" if value is None else str(value)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def say(text: str) -> None:
    """One line for the person at the terminal; standard output is for what was asked for."""
    click.echo(printable(scrubbed(text)), err=True)


def show_json(value: Mapping[str, object], *, more: bool = False) -> None:
    """One line of JSON, ASCII only: an object that says of which version it is, and whether there is `more`."""
    document = {"version": JSON_VERSION, "more": more, **value}
    click.echo(json.dumps(document, default=_plain, separators=(",", ":")))


def show_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[str] = (), whole: Sequence[str] = ()
) -> None:
    """A table: as wide as a terminal, and elsewhere one line a row.

    `numbers`: the headers of columns aligned right; `whole`: of those that have to be copied, and are never folded.
    """
    from outbox.cli.tables import table_lines

    cells = [[printable(value) for value in row] for row in rows]
    for line in table_lines(headers, cells, numbers=numbers, whole=whole, width=terminal_width()):
        click.echo(line)


def moment(value: datetime, *, zone: bool = True) -> str:
    """Return a moment as people read it, in UTC: a server's zone is not theirs. `zone`: say so; else a header does."""
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}{' UTC' if zone else ''}"


def terminal_width() -> int | None:
    """How many columns there are; None where nobody looks."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)
