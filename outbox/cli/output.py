"""Output for people and programs: text, tables, JSON. Text from a database is escaped for a terminal."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import click

from outbox.cli.tables import Alarm, table_lines
from outbox.runtime import secret, text
from outbox.runtime.document import json_text
from outbox.runtime.secret import Secret, forms_of

age, counted = text.age, text.counted

#: The form of `say` and `warn`; None: plain.
_form: logging.Formatter | None = None
#: The secrets of this process, in each form in which a text may hold a secret.
known_secrets: set[str] = set()


def keep_secret(secrets: Iterable[Secret]) -> None:
    """Remember secrets for `scrubbed`, which takes secrets out of every text."""
    known_secrets.update(forms_of(secrets))


def scrubbed(text: str) -> str:
    """Return a text without known secrets, and without the forms that secrets have in URLs."""
    return secret.scrubbed(text, known_secrets)


def printable(value: object) -> str:
    """Return a value as text, with its control characters as escapes."""
    text = "" if value is None else str(value)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def say(text: str) -> None:
    """Write one line to standard error, for the person at the terminal; standard output is for results."""
    _write(logging.INFO, "", text)


def warn(text: str) -> None:
    """Say something that a person has to look at; a terminal shows the first word in colour."""
    _write(logging.WARNING, f"{click.style('warning:', fg='yellow', bold=True)} ", text)


def fail(text: str) -> None:
    """Say an error."""
    _write(logging.ERROR, "Error: ", text)


def write_as(form: logging.Formatter | None) -> None:
    """Give the lines of `say`, `warn` and `fail` the form of the log, for programs that collect standard error."""
    global _form
    _form = form


def _write(level: int, begin: str, text: str) -> None:
    line = f"{begin}{printable(scrubbed(text))}"
    if _form is not None:
        line = _form.format(logging.LogRecord("outbox", level, "", 0, text, None, None))
    click.echo(line, err=True)


def tell(text: str, document: Mapping[str, object], *, json: bool) -> None:
    """Say what a command has done, in words or as JSON."""
    if json:
        show_json(document)
    else:
        say(text)


def show_json(value: Mapping[str, object], *, more: bool = False) -> None:
    """Write one line of JSON, ASCII only: an object with its version, and with `more`: whether there is more.

    Frozen values are printed by field.
    """
    click.echo(json_text(value, more=more))


def say_the_end(found: Sequence[object], limit: int, none: str, options: str) -> None:
    """Say that nothing was found, or that there is more than `limit`, and by which options to choose."""
    if not found:
        say(none)
    if len(found) > limit:
        say(f"there are more; choose by {options}, or raise --limit above {limit}")


def show_table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """Write a table: as wide as the terminal, and one line a row elsewhere. `numbers` are aligned right."""
    cells = [[Alarm(printable(each)) if isinstance(each, Alarm) else printable(each) for each in row] for row in rows]
    click.echo("\n".join(table_lines(headers, cells, numbers=numbers, width=terminal_width())))


def moment(value: datetime, *, zone: bool = True) -> str:
    """Return a moment in UTC, for people: a server has another zone. `zone`: append the zone, if no header has it."""
    return text.in_utc(value) if zone else text.in_utc(value).removesuffix(" UTC")


def terminal_width() -> int | None:
    """Return the number of columns of the terminal; None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
