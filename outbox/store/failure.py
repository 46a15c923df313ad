"""Errors as one line of text without parameters of statements."""

from __future__ import annotations

from outbox.errors import OutboxError
from outbox.model.command import OF_ENVIRONMENT, Commands

#: The SQLSTATE of a missing right, and of a missing column.
_NO_RIGHT, _NO_COLUMN = "42501", "42703"
#: The name of what is noted on an error.
_ABOUT = "outbox_commands"
_OF_A_DRIVER = ("DatabaseError", "InterfaceError")


def in_one_line(error: Exception, commands: Commands = OF_ENVIRONMENT) -> tuple[str, bool]:
    """Return an error as one line, and True if the line says enough without the traceback.

    `commands`: about the outbox where the error occurred.
    """
    if isinstance(error, OutboxError):
        return str(error), True
    # The text of SQLAlchemy's errors holds the statement and its parameters; that of the driver's error does not.
    cause = getattr(error, "orig", None) or error
    line = next(iter(str(cause).splitlines()), "")
    # The errors of every driver derive from a class of one of these names (PEP 249).
    foreseen = any(base.__name__ in _OF_A_DRIVER for base in type(cause).__mro__)
    text = f"{type(cause).__name__}: {line}" if foreseen else f"unexpected {type(cause).__name__}"
    return with_fix(text, cause, commands), foreseen


def note_missing_right(error: Exception, commands: Commands) -> None:
    """Note on a driver's error of a missing right about which outbox the error is, for whoever tells the error."""
    setattr(error, _ABOUT, commands)


def with_fix(text: str, error: Exception, commands: Commands) -> str:
    """Return the text of a driver's error, with the fix where a role lacks a right, or a table a column."""
    about, state = getattr(error, _ABOUT, None), getattr(error, "sqlstate", None)
    if state == _NO_COLUMN:
        # The version of the tables does not tell: earlier programs go on with the tables that a later one has upgraded.
        return f"{text}; for tables of an earlier version, run: {commands.line('db', 'upgrade')}"
    lacks = about is not None or state == _NO_RIGHT
    return f"{text}; {_fix(about or commands, '--relay', 'ROLE')}" if lacks else text


def fix_of_writer(error: Exception, commands: Commands) -> str:
    """Return the fix where the role of an application lacks a right."""
    return _fix(commands, "--writer", "ROLE", *(["--dedup"] if "outbox_dedup" in str(error) else []))


def _fix(commands: Commands, *roles: str) -> str:
    return f"for the rights of each role, run: {commands.line_without_database('db', 'grants', *roles)}"
