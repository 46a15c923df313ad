"""Output for people and programs: plain text, tables, JSON. Text from a database is escaped for a terminal."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from outbox.runtime import secret, text
from outbox.runtime.secret import Secret, forms_of

age, counted = text.age, text.counted

#: The version of the JSON that docs/json.md describes. It stays when a field is added, and rises when a field goes or
#: means something else.
JSON_VERSION = 1

#: The secrets that this process was given, in each form in which a text may hold them.
known_secrets: set[str] = set()


def keep_secret(secrets: Iterable[Secret]) -> None:
    """Remember secrets, so that `scrubbed` takes them out of every text."""
    known_secrets.update(forms_of(secrets))


def scrubbed(text: str) -> str:
    """Return a text without the secrets that are known, and without what looks like one."""
    return secret.scrubbed(text, known_secrets)


def printable(value: object) -> str:
    """Return a value as text, with its control characters as escapes."""
    text = "" if value is None else str(value)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def say(text: str) -> None:
    """Write one line to standard error, for the person at the terminal; standard output is for results."""
    click.echo(printable(scrubbed(text)), err=True)


def show_json(value: Mapping[str, object], *, more: bool = False) -> None:
    """Write one line of JSON, ASCII only: an object with its version, and with `more`: whether there is more."""
    document = {"version": JSON_VERSION, "more": more, **value}
    click.echo(json.dumps(document, default=_plain, separators=(",", ":")))


def show_table(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[str] = (), whole: Sequence[str] = ()
) -> None:
    """Write a table: as wide as the terminal, and elsewhere one line a row.

    `numbers`: the headers of columns that are aligned right. `whole`: the headers of columns that are never folded,
    because people copy their cells.
    """
    from outbox.cli.tables import table_lines

    cells = [[printable(value) for value in row] for row in rows]
    for line in table_lines(headers, cells, numbers=numbers, whole=whole, width=terminal_width()):
        click.echo(line)


def moment(value: datetime, *, zone: bool = True) -> str:
    """Return a moment as people read it, in UTC, because a server's zone is not theirs.

    `zone`: append the zone; without it a header says it.
    """
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}{' UTC' if zone else ''}"


def terminal_width() -> int | None:
    """Return the number of columns of the terminal; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)
