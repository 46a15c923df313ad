"""Our own connections to an SQLite file, and their locks in a fork."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Engine

from outbox.errors import DatabaseError
from outbox.store.dialects.dialect import Hint
from outbox.store.dialects.sqlite.filtering import add_functions
from outbox.store.dialects.sqlite.locking import BUSY_SECONDS, begin_immediate, prepare
from outbox.store.dialects.statements import Parameters, Row

#: So often a connection looks whether its file is still the one at its path, in seconds.
LOOK_SECONDS = 1.0

#: Connections of our own threads. Each has a lock, which is held while SQLite works for it and until its transaction
#: ends. A fork waits for all of these locks, because SQLite holds locks in memory then. A child would get copies of
#: them that are never released, and it would hang as soon as it connects.
_channels: WeakSet[SqliteChannel] = WeakSet()
_connecting = threading.RLock()
#: The locks that each fork in progress holds; a signal handler may fork in the middle of another fork.
_held: list[list[threading.RLock]] = []
_inherited: list[SqliteChannel] = []
#: The file that was opened for an engine.
_files: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()


def _before_fork() -> None:
    held: list[threading.RLock] = []
    _held.append(held)
    _connecting.acquire()
    held.append(_connecting)
    for channel in list(_channels):
        # Noted one by one, because Ctrl-C may interrupt the waiting.
        channel.lock.acquire()
        held.append(channel.lock)


def _after_fork() -> None:
    for lock in reversed(_held.pop()):
        lock.release()


def _after_fork_in_child() -> None:
    _inherited.extend(_channels)
    _after_fork()


def disown_inherited() -> None:
    """Close the parent's connections, before this process opens its own.

    While an inherited connection is open, SQLite believes to hold the lock on the file, and takes none for this
    process. The last other process to close the file would then delete the write-ahead log, with the commits of this
    process.
    """
    with _connecting:
        while _inherited:
            _inherited.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


class _FileReplacedError(sqlite3.OperationalError):
    """The connection works on a file that no other process can find; a new connection may find another one."""

    #: As for a file that cannot be read: another try may succeed.
    sqlite_errorcode = sqlite3.SQLITE_IOERR


class SqliteChannel:
    """A sqlite3 connection of its own to the same file."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.lock = threading.RLock()
        with _connecting:
            disown_inherited()
            # SQLite would make an empty file, and take the write-ahead log that the other one has left behind.
            if engine in _files and not _place_of(_files[engine]):
                raise _FileReplacedError(f"the file {_files[engine]} is not there any more")
            self._file = _files[engine] = _file_of(engine)
            self._driver = sqlite3.connect(self._file, isolation_level=None, check_same_thread=False)
            prepare(self._driver)
            self._opened, self._look_at = _place_of(self._file), time.monotonic() + LOOK_SECONDS
            self._driver.create_function("outbox_file", 0, lambda: self._opened)
            add_functions(self._driver)
            _channels.add(self)
        self.fileno: int | None = None

    def rows(self, statement: str, parameters: Parameters) -> list[Row]:
        """Run a statement and return its rows."""
        with self._working(statement):
            return self._driver.execute(statement, parameters).fetchall()

    def run(self, statement: str, parameters: Parameters) -> int:
        """Run a statement and return how many rows it touched."""
        with self._working(statement):
            return self._driver.execute(statement, parameters).rowcount

    def rows_of_last(self, statements: Sequence[tuple[str, Parameters]]) -> list[Row]:
        """Run statements in one transaction and return the rows of the last statement."""
        with nullcontext() if self._driver.in_transaction else self.transaction():
            return [self.rows(statement, parameters) for statement, parameters in statements][-1]

    def _working(self, statement: str) -> AbstractContextManager[Any]:
        """Return the context for a statement: a transaction for a write outside of one, else only the lock."""
        self._require_file()
        alone = not self._driver.in_transaction and not statement.lstrip().startswith("SELECT")
        return self.transaction() if alone else self.lock

    @contextmanager
    def transaction(self, *, patience: float | None = None) -> Iterator[None]:
        """Run the statements inside between BEGIN IMMEDIATE and COMMIT."""
        self._require_file()
        begun = False

        def begin(statement: str) -> None:
            # The second acquire keeps the lock until the end of the transaction. If the statement fails because
            # another connection has the write lock, only the `with` held it, and gives it back.
            nonlocal begun
            with self.lock:
                self._driver.execute(statement)
                begun = self.lock.acquire()

        try:
            begin_immediate(self._execute, begin, seconds=BUSY_SECONDS if patience is None else patience)
            yield
            self._execute("COMMIT")
        except BaseException:
            if begun:
                with suppress(sqlite3.Error):
                    self._execute("ROLLBACK")
            raise
        finally:
            if begun:
                self.lock.release()

    def _require_file(self) -> None:
        """Refuse once in a while to go on with a file that is no longer at its path.

        The file itself stays, without a name, as long as a connection is open: nobody would write to it any more.
        """
        if time.monotonic() >= self._look_at and not self._driver.in_transaction:
            if _place_of(self._file) != self._opened:
                raise _FileReplacedError(f"the file {self._file} was replaced or removed while it was open")
            self._look_at = time.monotonic() + LOOK_SECONDS

    def _execute(self, statement: str) -> None:
        with self.lock:
            self._driver.execute(statement)

    def unlimited(self) -> None:
        """Do nothing: no statement has a limit of time."""

    def listen(self) -> None:
        """Do nothing: on SQLite wake-ups do not reach other processes."""

    def hinted(self) -> Hint | None:
        """Return None: no wake-ups arrive on SQLite."""
        return None

    def notify(self, pause: float = 0.0) -> None:
        """Do nothing: no other process can listen on SQLite."""

    def close(self) -> None:
        """Close the file."""
        with self.lock, suppress(Exception):
            self._driver.close()


def _place_of(file: str) -> str:
    """Return the device and the inode of a path; "" if there is no such file."""
    try:
        found = Path(file).stat()
    except FileNotFoundError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def _file_of(engine: Engine) -> str:
    """Return the file that an engine opens. A new connection is asked, because the engine's pool may be exhausted."""
    pool = engine.pool.recreate()
    with closing(pool.connect()) as connection:
        files = [row[2] for row in connection.cursor().execute("PRAGMA database_list") if row[1] == "main"]
    pool.dispose()
    if not files or not files[0]:
        raise DatabaseError("a worker cannot open an in-memory SQLite database on its own; use a file")
    return str(files[0])
