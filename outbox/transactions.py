"""The caller's transaction: finding it, making sure that it is one, and noticing its real commit.

Everything hangs on the engine's own events. `commit` fires once for the real commit, right before it, and never for a
savepoint or for a session inside somebody else's transaction; the connection's return to the pool comes right after it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psycopg
from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.pool import Pool

from outbox.errors import DatabaseError, NoTransactionError, TransactionAbortedError
from outbox.faults import crash_point
from outbox.handles import Handle, Link, refuse
from outbox.store.database import Database
from outbox.store.writing import Place

logger = logging.getLogger("outbox")


class Listener(Protocol):
    """Told of commits. Never blocks and never raises: it is called in commit hooks."""

    def expect(self, transaction: int, places: Sequence[Place]) -> None:
        """A transaction is about to be committed, and nobody may tell when it was."""

    def committed(self, transaction: int) -> None:
        """An expected commit has come true."""


class Transactions:
    """Watches the transactions in which messages were sent."""

    def __init__(self, database: Database, *listeners: Listener) -> None:
        self._database = database
        self._dialect = database.dialect
        self._listeners = listeners
        self._watched: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        # Keys in a connection's `info`: places of what was sent in the running transaction; whether the one before
        # was committed. Each outbox has its own, because an engine may serve several.
        self._sent, self._committed = object(), object()
        self.watch(database.engine)

    def link_of(self, handle: Handle, *, flush: bool) -> Link:
        """The connection that the handle's transaction is on.

        Raises:
            TypeError: it is none of the accepted handles.
            NoTransactionError: the connection is in autocommit.
            DatabaseError: it is connected to another kind of database, or by a driver that cannot be used.
        """
        if isinstance(handle, Connection):
            connection = handle
        elif isinstance(handle, Session | scoped_session):
            session = handle() if isinstance(handle, scoped_session) else handle
            if flush and session.autoflush and not session._flushing:
                session.flush()
            connection = session.connection(bind_arguments={"clause": self._database.tables.message})
        elif isinstance(handle, psycopg.Connection):
            self.require_driver(handle)
            return handle
        else:
            raise refuse(handle, "send")
        self.watch(connection.engine)
        if not connection.in_transaction():
            connection.begin()
        self._require_transaction(connection.connection.driver_connection)
        return connection

    def require_driver(self, driver: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
        """Make sure that psycopg's own connection is in a transaction of the right kind of database.

        Raises:
            NoTransactionError: it commits every statement by itself.
            DatabaseError: the outbox is not on PostgreSQL.
        """
        if self._dialect.name != "postgresql":
            raise DatabaseError(f"the outbox is on {self._dialect.name}, a psycopg connection is to PostgreSQL")
        self._require_transaction(driver)

    def sent(self, link: Link | psycopg.AsyncConnection[Any], places: Sequence[Place] = ()) -> None:
        """Messages are part of this connection's transaction now; `places`: those that their writer will send."""
        if isinstance(link, Connection):
            link.info.setdefault(self._sent, []).extend(places)
        crash_point("outbox.after_insert")

    def expected_of(self, connection: Connection) -> int:
        """How many messages of the running transaction their writer will send."""
        return len(connection.info.get(self._sent, ()))

    def _require_transaction(self, driver: Any) -> None:
        if self._dialect.is_aborted(driver):
            raise TransactionAbortedError(
                "a statement of this transaction failed, so nothing can be written in it any more; roll back, or use a"
                " savepoint around what may fail"
            )
        if self._dialect.commits_every_statement(driver):
            raise NoTransactionError(
                "this connection commits every statement by itself (AUTOCOMMIT), so the message would outlive a"
                " rollback; use an engine without isolation_level='AUTOCOMMIT', or begin a transaction"
            )

    def watch(self, engine: Engine) -> None:
        """Notice the transactions on this engine, from their begin on; once is enough.

        Raises:
            DatabaseError: it is to another kind of database, or by a driver that cannot be used.
        """
        if engine in self._watched:
            return
        if engine.dialect.name != self._dialect.name:
            raise DatabaseError(f"the outbox is on {self._dialect.name}, this connection is to {engine.dialect.name}")
        if engine.dialect.driver not in self._dialect.drivers:
            known = ", ".join(sorted(self._dialect.drivers))
            raise DatabaseError(
                f"{engine.dialect.driver} does not tell whether a transaction failed; use one of these drivers: {known}"
            )
        self._watched.add(engine)
        event.listen(engine, "commit", self._before_commit)
        event.listen(engine, "rollback", self._forget)
        event.listen(engine, "prepare_twophase", lambda connection, _xid: self._require_sound(connection))
        event.listen(engine, "commit_twophase", lambda connection, *_: self._before_commit(connection, "tpc_rollback"))
        event.listen(engine, "rollback_twophase", lambda connection, *_: self._forget(connection))
        if engine.pool not in self._pools:
            # Engines with other execution options share it.
            self._pools.add(engine.pool)
            event.listen(engine.pool, "checkin", self._returned)
        if self._dialect.prepare_engine is not None:
            self._dialect.prepare_engine(engine)

    def _before_commit(self, connection: Connection, roll_back: str = "rollback") -> None:
        """The real commit comes next; `roll_back` is the driver's word for the contrary."""
        if self._sent not in connection.info:
            return
        try:
            self._require_sound(connection)
        except TransactionAbortedError:
            # From here on SQLAlchemy holds the transaction for ended, and a Connection would stay in the aborted one.
            connection.info.pop(self._sent)
            getattr(connection.connection.dbapi_connection, roll_back)()
            raise
        places = connection.info.pop(self._sent)
        crash_point("outbox.before_commit")
        connection.info[self._committed] = True
        # A connection that its owner keeps will not be returned: then a moment's delay has to do.
        self._tell(lambda listener: listener.expect(id(connection.info), places))

    def _require_sound(self, connection: Connection) -> None:
        """PostgreSQL answers the commit of a failed transaction with a rollback, and no driver tells."""
        if self._sent in connection.info and self._dialect.is_aborted(connection.connection.driver_connection):
            raise TransactionAbortedError(
                "a statement of this transaction failed, so its COMMIT would silently become a ROLLBACK and the message"
                " would be lost; roll back, or use a savepoint around what may fail"
            )

    def _returned(self, _driver: object, record: Any) -> None:
        """Back in the pool: what it committed is visible now."""
        record.info.pop(self._sent, None)
        if record.info.pop(self._committed, False):
            crash_point("outbox.after_commit")
            self._tell(lambda listener: listener.committed(id(record.info)))

    def _tell(self, tell: Callable[[Listener], None]) -> None:
        for listener in self._listeners:
            try:
                tell(listener)
            except Exception:
                # It would keep the application from committing, or reach it although everything is committed.
                logger.exception("a listener to commits failed; what it would have sent is found by a worker")

    def _forget(self, connection: Connection) -> None:
        # A lost connection has nothing to forget, and asking it would raise in the application's rollback.
        if not connection.invalidated:
            connection.info.pop(self._sent, None)
