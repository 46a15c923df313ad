"""What went wrong, in one line that holds no parameters of a statement."""

from __future__ import annotations

import sqlite3

import psycopg

from outbox.errors import OutboxError


def in_one_line(error: Exception) -> tuple[str, bool]:
    """Return an error as one line, and whether that line says enough without its traceback."""
    if isinstance(error, OutboxError):
        return str(error), True
    # Of SQLAlchemy's errors what the driver said: around it stand the statement and its parameters.
    cause = getattr(error, "orig", None) or error
    line = next(iter(str(cause).splitlines()), "")
    foreseen = isinstance(cause, psycopg.Error | sqlite3.Error)
    return f"{type(cause).__name__}: {line}" if foreseen else f"unexpected {type(cause).__name__}", foreseen


def without_server(error: str, destination: str) -> str:
    """Return a sender's text without the server that it names, where `destination` names the same one beside it."""
    scheme, separator, rest = destination.partition("://")
    server = f"{scheme}{separator}{rest.partition('/')[0]}"
    return error.replace(f"{server}: ", "") if separator else error
