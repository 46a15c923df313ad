"""Errors in one line: the text of a driver's error is shown, that of any other error may hold anything."""

import binascii
import sqlite3

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from outbox.errors import DatabaseError
from outbox.store.dialects.postgresql.dialect import DIALECT
from outbox.store.failure import in_one_line


@pytest.mark.parametrize(
    ("error", "line", "foreseen"),
    [
        (DatabaseError("no tables"), "no tables", True),
        (psycopg.errors.LockNotAvailable("locked\nCONTEXT: more"), "LockNotAvailable: locked", True),
        (psycopg.InterfaceError("closed"), "InterfaceError: closed", True),
        (
            OperationalError("SELECT :secret", {}, sqlite3.OperationalError("no such table: t")),
            "OperationalError: no such table: t",
            True,
        ),
        (binascii.Error("a secret"), "unexpected Error", False),
        (KeyError("a secret"), "unexpected KeyError", False),
    ],
)
def test_only_the_text_of_a_driver_s_error_and_of_ours_is_shown(error, line, foreseen):
    assert in_one_line(error) == (line, foreseen)


class RefusedError(Exception):
    """An error of a driver of PostgreSQL, with the fields by which drivers tell its code."""

    def __init__(self, *arguments: object, **fields: str) -> None:
        super().__init__(*arguments)
        vars(self).update(fields)


@pytest.mark.parametrize("field", ["sqlstate", "pgcode", "C"])
def test_a_missing_right_is_known_whatever_the_driver(field):
    """The codes are from psycopg and asyncpg, psycopg2, and pg8000."""
    missing, other = (
        RefusedError({"C": code}) if field == "C" else RefusedError("refused", **{field: code})
        for code in ("42501", "42P01")
    )

    assert (DIALECT.errors.lacks_right(missing), DIALECT.errors.lacks_right(other)) == (True, False)
