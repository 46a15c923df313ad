"""Errors as one line of text that holds no parameters of a statement."""

from __future__ import annotations

import sqlite3

import psycopg

from outbox.errors import OutboxError


def in_one_line(error: Exception) -> tuple[str, bool]:
    """Return an error as one line, and whether that line says enough without its traceback."""
    if isinstance(error, OutboxError):
        return str(error), True
    # The text of SQLAlchemy's errors holds the statement and its parameters; that of the driver's error does not.
    cause = getattr(error, "orig", None) or error
    line = next(iter(str(cause).splitlines()), "")
    foreseen = isinstance(cause, psycopg.Error | sqlite3.Error)
    return f"{type(cause).__name__}: {line}" if foreseen else f"unexpected {type(cause).__name__}", foreseen
