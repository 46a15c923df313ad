"""Errors as one line of text without parameters of statements."""

from __future__ import annotations

from outbox.errors import OutboxError

_OF_A_DRIVER = ("DatabaseError", "InterfaceError")


def in_one_line(error: Exception) -> tuple[str, bool]:
    """Return an error as one line, and True if the line says enough without the traceback."""
    if isinstance(error, OutboxError):
        return str(error), True
    # The text of SQLAlchemy's errors holds the statement and its parameters; that of the driver's error does not.
    cause = getattr(error, "orig", None) or error
    line = next(iter(str(cause).splitlines()), "")
    # The errors of every driver derive from a class of one of these names (PEP 249).
    foreseen = any(base.__name__ in _OF_A_DRIVER for base in type(cause).__mro__)
    return f"{type(cause).__name__}: {line}" if foreseen else f"unexpected {type(cause).__name__}", foreseen
