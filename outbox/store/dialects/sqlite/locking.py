"""The lock of an SQLite file. One writer has the lock; the others try again and again."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: How long a writer waits for the others, in seconds.
BUSY_SECONDS = 30.0
#: How long SQLite itself waits where a read finds the whole file locked for a moment.
_OWN_PAUSES, _BUSY_MILLISECONDS = "PRAGMA busy_timeout = {}", 1000


def begin_immediate(
    execute: Callable[[str], Any],
    begin: Callable[[str], Any] | None = None,
    *,
    seconds: float = BUSY_SECONDS,
    pause: Callable[[float], Any] = time.sleep,
) -> None:
    """Take the write lock now, trying every 0.3 to 2 ms; `begin` executes the statement.

    SQLite's busy handler is off until then, because it sleeps up to 100 ms between tries: among busy writers one might
    never get the lock.
    """
    execute(_OWN_PAUSES.format(0))
    try:
        _until_taken(begin or execute, time.monotonic() + seconds, pause)
    except BaseException:
        # If the connection is closed by now, the setting fails as well; the first error is the one to raise.
        with suppress(sqlite3.Error):
            execute(_OWN_PAUSES.format(_BUSY_MILLISECONDS))
        raise
    execute(_OWN_PAUSES.format(_BUSY_MILLISECONDS))


def _until_taken(begin: Callable[[str], Any], deadline: float, pause: Callable[[float], Any]) -> None:
    while True:
        try:
            begin("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
        pause(random.uniform(0.0003, 0.002))


def is_busy(error: Exception) -> bool:
    """Return whether another connection has the lock."""
    return isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "busy" in str(error))


def prepare(driver: sqlite3.Connection) -> None:
    """Set up a new connection: WAL, and commits that return when they are on disk."""
    # Do not wait inside SQLite for a locked file, because a fork may wait for us.
    driver.execute(_OWN_PAUSES.format(0))
    # Changing the journal mode locks the whole file for a moment; other processes may try the same.
    for _ in range(200):
        try:
            if driver.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
                break
            driver.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            time.sleep(random.uniform(0.005, 0.02))
    driver.execute(_OWN_PAUSES.format(_BUSY_MILLISECONDS))
    driver.execute("PRAGMA synchronous = FULL")
