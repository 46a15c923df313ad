"""Errors in one line: the text of a driver's error is shown, that of any other error may hold anything."""

import binascii
import sqlite3

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from outbox.errors import DatabaseError
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
