"""Engines for SQLite: every transaction begins with the write lock, and ends as SQLAlchemy says."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.util import await_only

from outbox.errors import DatabaseError
from outbox.store.dialects.dialect import driver_of
from outbox.store.dialects.sqlite.channel import disown_inherited
from outbox.store.dialects.sqlite.locking import begin_immediate, prepare

#: The driver begins transactions as `isolation_level` says. Before Python 3.12 it knew no other mode; since then this
#: one is the default.
_LEGACY = -1


def _require_legacy_control(connect_args: Mapping[str, Any]) -> None:
    """Refuse a driver that would begin transactions, or would not commit ours."""
    if connect_args.get("autocommit", _LEGACY) != _LEGACY:
        raise DatabaseError(
            "outbox.create_engine begins and commits SQLite's transactions itself, which the driver's"
            f" autocommit={connect_args['autocommit']!r} does not let it do; leave autocommit out of connect_args"
        )


def configure(engine: Engine, connect_args: Mapping[str, Any]) -> None:
    """Set up an engine of our own: WAL, durable commits, and every transaction begins with the write lock."""
    _require_legacy_control(connect_args)

    @event.listens_for(engine, "connect")
    def _connected(driver: sqlite3.Connection, _record: object) -> None:
        disown_inherited()
        driver.isolation_level = None
        prepare(driver)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection._is_autocommit_isolation():
            # SQLAlchemy does not commit in this mode, so a transaction that we begin would be lost.
            return
        begin_immediate(_cursor_of(connection).execute, pause=_pause_of(engine))


def _cursor_of(connection: Connection) -> Any:
    """Return a cursor that can be used without await, also where SQLAlchemy itself awaits an async driver."""
    return connection.connection.dbapi_connection.cursor()  # type: ignore[union-attr]


def _pause_of(engine: Engine) -> Callable[[float], Any]:
    """Return a sleep that does not stop the holder of the lock, which may run in the same event loop."""
    if not engine.dialect.is_async:
        return time.sleep
    import asyncio

    return lambda seconds: await_only(asyncio.sleep(seconds))


#: Dialects of engines that `make_fit` has prepared. Engines that differ only in execution options share a dialect.
_fit: WeakSet[Any] = WeakSet()


def make_fit(engine: Engine) -> None:
    """Prepare an engine of the application for sending messages; once, however many outboxes use it.

    Other threads may be connecting with it meanwhile.
    """
    if engine.dialect not in _fit:
        _fit.add(engine.dialect)
        _remember_begins(engine.dialect)
        _begin_before_savepoints(engine.dialect)
        _end_what_was_begun(engine.dialect)
        event.listen(engine, "connect", _about_to_connect, insert=True)


class _Begun:
    """A transaction of SQLAlchemy; `pooled` is its connection, and None once the transaction has ended."""

    def __init__(self, dialect: Any, pooled: Any) -> None:
        self.dialect = dialect
        self.pooled = pooled


#: Transactions that this thread or task has begun; in those that have ended, `pooled` is None.
_begun: ContextVar[tuple[_Begun, ...]] = ContextVar("outbox_begun", default=())
_BEGUN = object()


def waits_for_itself(engine: Engine) -> bool:
    """Return whether this thread or task has a transaction open on the engine; another one would wait for it."""
    return any(
        each.dialect is engine.dialect and _driver_is_busy(each) for each in _begun.get() if each.pooled is not None
    )


def _driver_is_busy(begun: _Begun) -> bool:
    driver = begun.dialect.get_driver_connection(begun.pooled.dbapi_connection)
    return bool(driver is not None and driver.in_transaction)


def _remember_begins(dialect: Any) -> None:
    """Record in `_begun` each transaction that SQLAlchemy begins, by replacing the dialect's `do_begin`."""
    begin_first = dialect.do_begin

    def do_begin(pooled: Any) -> None:
        begin_first(pooled)
        begun = _Begun(dialect, pooled)
        pooled.info[_BEGUN] = begun
        _begun.set((*(each for each in _begun.get() if each.pooled is not None), begun))

    dialect.do_begin = do_begin


def _forget_begin(pooled: Any) -> None:
    with suppress(NotImplementedError, InvalidRequestError):
        begun = pooled.info.pop(_BEGUN, None)
        if begun is not None:
            begun.pooled = None


def _about_to_connect(_driver: object, _record: object) -> None:
    disown_inherited()


def _begin_before_savepoints(dialect: Any) -> None:
    """Begin a transaction before a savepoint, because the driver does not, and RELEASE would commit."""
    by_driver = dialect.do_savepoint

    def do_savepoint(connection: Connection, name: str) -> None:
        if not driver_of(connection).in_transaction:
            _cursor_of(connection).execute("BEGIN")
        by_driver(connection, name)

    dialect.do_savepoint = do_savepoint


def _end_what_was_begun(dialect: Any) -> None:
    """Make commit and rollback end a transaction that a BEGIN statement opened, in every mode of the driver.

    The BEGIN may come from the application, or from us before a savepoint. With `autocommit=True` the driver's own
    commit and rollback do nothing.
    """

    def ending(by_driver: Callable[[Any], None], statement: str) -> Callable[[Any], None]:
        def end(pooled: Any) -> None:
            by_driver(pooled)
            _forget_begin(pooled)
            driver = dialect.get_driver_connection(pooled.dbapi_connection)
            if _autocommit_of(driver) is True and driver.in_transaction:
                pooled.cursor().execute(statement)

        return end

    dialect.do_commit = ending(dialect.do_commit, "COMMIT")
    dialect.do_rollback = ending(dialect.do_rollback, "ROLLBACK")


def commits_every_statement(driver: Any) -> bool:
    """Return whether the driver commits every statement: no transaction is open, and the driver would begin none.

    In the legacy mode the driver begins a transaction before an INSERT if there is an isolation level. With
    `autocommit=False` a transaction is always open, unless a statement has ended it. With `autocommit=True` the driver
    begins none.
    """
    begins = _autocommit_of(driver) == _LEGACY and driver.isolation_level is not None
    return not begins and not driver.in_transaction


def _autocommit_of(driver: Any) -> Any:
    """Return the driver's `autocommit`, which Python has from 3.12 on: True, False, or `_LEGACY`."""
    # aiosqlite holds the driver's connection in a private attribute, which is None when closed.
    own = getattr(driver, "_connection", driver)
    try:
        return getattr(own, "autocommit", _LEGACY)
    except sqlite3.ProgrammingError:
        # The connection is closed, or is one of aiosqlite to a database in memory, which only its own thread may ask.
        return _LEGACY if own is driver else await_only(driver._execute(getattr, own, "autocommit"))
