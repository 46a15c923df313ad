"""Our own connections to PostgreSQL, by psycopg."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import ByteaBinaryLoader, StrDumperUnknown
from sqlalchemy import Engine

from outbox.errors import DatabaseError
from outbox.store.dialects.dialect import Hint
from outbox.store.dialects.postgresql.silence import RoundTrips, WatchedConnection
from outbox.store.dialects.statements import Parameters, Row, pyformat

#: Our settings, whatever the role's defaults are. They are set once on a connection of our own. Per transaction they
#: would double the time of the idle poll, because each transaction here is one statement or a few.
#: The sequential scan is off because a plan that was made while a table was nearly empty is kept as long as the
#: connection, and must not read all rows. Where only such a scan is possible, its price looks enormous; jit is off
#: because it would compile that statement.
#: The last two end a connection that is idle while a handler works, and a long transaction; older servers do not know
#: them, and would refuse a SET.
_SETTINGS = """
    SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE, NOT DEFERRABLE;
    SET synchronous_commit = on;
    SET statement_timeout = '60s';
    SET lock_timeout = '10s';
    SET idle_in_transaction_session_timeout = '60s';
    SET client_encoding = 'UTF8';
    SET enable_seqscan = off;
    SET jit = off;
    SELECT set_config(name, '0', false) FROM unnest(ARRAY['idle_session_timeout', 'transaction_timeout']) AS name
    WHERE current_setting(name, true) IS NOT NULL
"""

_IN_TRANSACTION = frozenset((psycopg.pq.TransactionStatus.INTRANS, psycopg.pq.TransactionStatus.INERROR))
#: The payload of a writer's notification: for how many milliseconds it pauses.
_MILLISECONDS = re.compile(r"[0-9]{1,6}")
#: Seconds for the first two, a count, and milliseconds for the last.
_PATIENCE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}


class PostgresChannel:
    """A psycopg connection in autocommit, made as the engine makes its own."""

    def __init__(self, engine: Engine, name: str) -> None:
        # A connection of the engine's own pool would take a place there. Detached, it would leave a place to be filled
        # again, and the application would go round more connections than it needs.
        self._owner = engine.pool.recreate().connect()
        driver = self._owner.driver_connection
        self._owner.detach()
        if not isinstance(driver, psycopg.Connection):
            self._owner.close()
            raise DatabaseError(f"workers need the psycopg driver, not {type(driver).__module__}")
        self._driver = driver
        if isinstance(driver, WatchedConnection):
            driver.leave_to_owner()
        # Before the first statement, which would wait for a network that is gone as long as the system's own settings.
        _watch_over(driver.fileno())
        self._round_trips = RoundTrips(driver.fileno())
        self._name = sql.Identifier(name)
        # A hint need not be durable, and a durable commit would wait for the disk.
        notify = sql.SQL("SET LOCAL synchronous_commit = off; NOTIFY {}").format(self._name)
        self._notify = notify.as_bytes(driver)
        with self._round_trips:
            driver.rollback()
        # The driver says so in every BEGIN, whatever the role's defaults are, or an engine with an isolation_level. It
        # does not say READ WRITE, because a standby would refuse.
        driver.isolation_level, driver.read_only, driver.deferrable = psycopg.IsolationLevel.READ_COMMITTED, None, None
        driver.autocommit = True
        with self._round_trips:
            letters = _letters_of(driver)
        # A handler keeps psycopg from hoarding the notifications that come along with other answers.
        self._hint: Hint | None = None
        driver.add_notify_handler(self._notice)
        self._cursor = driver.cursor(binary=True)
        # Left as they are on the wire; a datetime or a UUID is made only when somebody reads it.
        self._cursor.adapters.register_loader("timestamptz", Int8BinaryLoader)
        self._cursor.adapters.register_loader("uuid", ByteaBinaryLoader)
        if letters is not None:
            self._cursor.adapters.register_dumper(str, _escaping(letters))
        self.fileno: int | None = driver.fileno()

    def rows(self, statement: str, parameters: Parameters) -> list[Row]:
        """Run a statement and return its rows, read in the binary protocol."""
        with self._round_trips:
            return self._cursor.execute(pyformat(statement).encode(), parameters).fetchall()

    def run(self, statement: str, parameters: Parameters) -> int:
        """Run a statement and return how many rows it touched."""
        with self._round_trips:
            return self._cursor.execute(pyformat(statement).encode(), parameters).rowcount

    def rows_of_last(self, statements: Sequence[tuple[str, Parameters]]) -> list[Row]:
        """Run statements in one transaction and return the rows of the last; in one round trip if libpq is able to.

        The server takes statements that are sent together for one transaction.
        """
        with self._round_trips:
            if not psycopg.Pipeline.is_supported():
                with self._driver.transaction():
                    self._execute(statements)
            else:
                errors: list[psycopg.Error] = []
                # The error of the block is kept, because at the end the driver would log one that it replaces.
                with _kept(errors), self._driver.pipeline(), _kept(errors):
                    self._execute(statements)
                if errors:
                    raise errors[0]
        return self._cursor.fetchall()

    def _execute(self, statements: Sequence[tuple[str, Parameters]]) -> None:
        *before, (last, parameters) = statements
        for statement, bound in before:
            self._driver.execute(pyformat(statement).encode(), bound)
        self._cursor.execute(pyformat(last).encode(), parameters)

    @contextmanager
    def transaction(self, *, patience: float | None = None) -> Iterator[None]:
        """Run the statements inside between BEGIN and COMMIT on this connection."""
        if self._driver.info.transaction_status in _IN_TRANSACTION:
            # The driver would make a savepoint, and whoever opened the transaction could take this one back.
            raise DatabaseError("a connection has one transaction at a time; another call needs another connection")
        with self._round_trips, self._driver.transaction():
            if patience is not None:
                self._driver.execute(f"SET LOCAL lock_timeout = {int(patience * 1000)}")
            with self._round_trips.paused():
                yield

    def unlimited(self) -> None:
        """Let the statements of the open transaction take as long as they need."""
        with self._round_trips:
            self._driver.execute("SET LOCAL statement_timeout = 0")
        self._round_trips.limited = False

    def listen(self) -> None:
        """Execute LISTEN. If a pooler drops it, messages wait for the next poll, and none is lost."""
        with self._round_trips:
            self._driver.execute(sql.SQL("LISTEN {}").format(self._name))

    def hinted(self) -> Hint | None:
        """Read all notifications, also those received with other answers, and return their hint; None: no hint."""
        self._driver.pgconn.consume_input()
        while notify := self._driver.pgconn.notifies():
            self._note(notify.extra.decode(errors="replace"))
        hint, self._hint = self._hint, None
        return hint

    def _notice(self, notify: psycopg.Notify) -> None:
        self._note(notify.payload)

    def _note(self, milliseconds: str) -> None:
        # Any client of the database may notify on this name, with any payload.
        pause = int(milliseconds) / 1000 if _MILLISECONDS.fullmatch(milliseconds) else 0.0
        self._hint = Hint(max(pause, self._hint.pause if self._hint else 0.0))

    def notify(self, pause: float = 0.0) -> None:
        """Execute NOTIFY, outside of the business transaction, where NOTIFY would take a global lock at the commit."""
        # Called on libpq itself, which takes a tenth of the interpreter's time that a cursor takes. The server takes
        # statements that are sent together for one transaction, so the setting ends with it.
        with self._round_trips:
            answer = self._driver.pgconn.exec_(self._notify + (b", '%d'" % round(1000 * pause) if pause else b""))
        if answer.status != psycopg.pq.ExecStatus.COMMAND_OK:
            raise psycopg.OperationalError(answer.get_error_message())

    def close(self) -> None:
        """Close the socket without the pool, which would roll back first, and log an error for a lost connection."""
        with suppress(Exception):
            self._driver.close()
            self._owner.invalidate()


class WorkerChannel(PostgresChannel):
    """A channel with our settings, for the session of a worker or a command."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(engine, name)
        with self._round_trips:
            self._driver.execute(_SETTINGS)


@contextmanager
def _kept(errors: list[psycopg.Error]) -> Iterator[None]:
    """Append the error of the block to a list."""
    try:
        yield
    except psycopg.Error as error:
        errors.append(error)


def _letters_of(driver: psycopg.Connection[Any]) -> str | None:
    """Return the codec of a database that cannot store every text; None where texts need no escaping."""
    encoding = driver.info.parameter_status("server_encoding")
    if encoding in (None, "UTF8", "SQL_ASCII"):
        return None
    driver.execute(sql.SQL("SET client_encoding = {}").format(encoding))
    try:
        return driver.info.encoding
    except psycopg.NotSupportedError:
        return None
    finally:
        # Called on libpq itself, because psycopg executes nothing under an encoding that Python does not know.
        driver.pgconn.exec_(b"SET client_encoding = 'UTF8'")


def _escaping(codec: str) -> type[StrDumperUnknown]:
    """Return a dumper that escapes letters which `codec` cannot hold, because a destination's error may hold any."""

    class Escaping(StrDumperUnknown):
        def dump(self, obj: str) -> Buffer | None:
            return super().dump(obj.encode(codec, "backslashreplace").decode(codec))

    return Escaping


def _watch_over(descriptor: int) -> None:
    """Make the system notice a peer that vanished in seconds instead of hours, where the socket has such options."""
    with socket.socket(fileno=os.dup(descriptor)) as peer:
        if peer.family not in (socket.AF_INET, socket.AF_INET6):
            return
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PATIENCE.items():
            if hasattr(socket, option):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
