"""Failures as a user meets them: one line with the fix, and an exit code."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable

import psycopg
from sqlalchemy.exc import DBAPIError

from outbox.cli.output import fail, say
from outbox.errors import (
    DatabaseError,
    FilterError,
    HungHandlerError,
    MissingExtraError,
    OutboxError,
    SenderError,
    SubscriptionError,
)
from outbox.model.command import OF_ENVIRONMENT, Commands
from outbox.store.failure import with_fix

FAILURE, USAGE, UNREACHABLE, UNFINISHED = 1, 2, 3, 4

#: Classes of SQLSTATE for a database that is not there, takes no connections now, or refuses this user.
_NO_CONNECTION = ("08", "28", "3D", "53", "57P")

#: SQLAlchemy's words at the first connection to a server that is no PostgreSQL.
_OTHER_SERVER = re.compile(r"Could not determine version from string '([^']*)'")


def report_failure(
    error: Exception, labelled: Callable[[str], str] = str, commands: Commands = OF_ENVIRONMENT
) -> int | None:
    """Tell the error in one line, a filter in three; return the exit code, or None for an unforeseen error.

    `labelled` begins the line with the database or the option. `commands`: about the outbox of the error.
    """
    if isinstance(error, OutboxError):
        told = [str(error)]
        if isinstance(error, FilterError):
            # The filter, with a caret below.
            told = str(error).split("\n")
        fail(labelled(told[0]))
        for line in told[1:]:
            say(line)
        return _code_of(error)
    if isinstance(error, AssertionError) and (named := _OTHER_SERVER.search(str(error))):
        text = f"{named[1]:.80} only speaks as PostgreSQL does; its snapshots cannot tell which messages are new"
        fail(labelled(f"{text}; use PostgreSQL itself"))
        return USAGE
    driver = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    if not isinstance(driver, psycopg.Error | sqlite3.Error):
        return None
    line = " ".join(str(driver).split()) or type(driver).__name__
    if _unreachable(driver):
        fail(labelled(f"the database cannot be reached: {line}"))
        return UNREACHABLE
    fail(labelled(with_fix(f"the database refused: {line}", driver, commands)))
    return FAILURE


def _code_of(error: OutboxError) -> int:
    if isinstance(error, HungHandlerError):
        return UNFINISHED
    configuration = FilterError | SenderError | MissingExtraError | SubscriptionError | DatabaseError
    return USAGE if isinstance(error, configuration) else FAILURE


def _unreachable(error: BaseException) -> bool:
    if isinstance(error, psycopg.Error):
        state = error.sqlstate
        return state.startswith(_NO_CONNECTION) if state else isinstance(error, psycopg.OperationalError)
    return isinstance(error, sqlite3.OperationalError) and "unable to open" in str(error)
