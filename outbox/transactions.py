"""The caller's transaction: finding it, making sure that it is one, and telling listeners of its real commit."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import psycopg
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session, scoped_session

from outbox import commits
from outbox.errors import DatabaseError, NoTransactionError, TransactionAbortedError
from outbox.faults import crash_point
from outbox.handles import Handle, Link, refuse
from outbox.store.database import Database
from outbox.store.dialect import driver_of
from outbox.store.writing import Place, Sent

logger = logging.getLogger("outbox")


class Listener(Protocol):
    """Told of commits. Never blocks and never raises: it is called in commit hooks."""

    def committed(self, sent: Sent, since: float) -> None:
        """A transaction was committed in which messages were sent; `since`: a moment before, by `clock`."""


class Transactions:
    """Watches the transactions in which messages were sent."""

    def __init__(self, database: Database, *listeners: Listener) -> None:
        self._database = database
        self._dialect = database.dialect
        self._listeners = listeners
        self._watched: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.watch(database.engine)

    def link_of(self, handle: Handle, verb: str, *, flush: bool) -> Link:
        """The connection that the handle's transaction is on; `verb` is the method that was called with it.

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
            raise refuse(handle, verb)
        self.watch(connection.engine)
        if not connection.in_transaction():
            connection.begin()
        self._require_transaction(driver_of(connection))
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

    def sent(
        self, link: Link | psycopg.AsyncConnection[Any], direct: Sequence[Place] = (), *, more: bool = True
    ) -> None:
        """Messages are part of this connection's transaction now; `direct`: those that their writer will send."""
        if isinstance(link, Connection):
            sent = commits.sent_by(self, link)
            sent.direct.extend(direct)
            sent.more = sent.more or more
        crash_point("outbox.after_insert")

    def expected_of(self, connection: Connection) -> int:
        """How many messages of the running transaction their writer will send."""
        sent = commits.sent_so_far(self, connection)
        return 0 if sent is None else len(sent.direct)

    def _require_transaction(self, driver: Any) -> None:
        if self._dialect.is_aborted(driver):
            raise TransactionAbortedError(
                "a statement of this transaction failed, so nothing can be written in it any more; roll back, or use a"
                " savepoint around what may fail"
            )
        if self._dialect.commits_every_statement(driver):
            raise NoTransactionError(
                "this connection commits every statement by itself (AUTOCOMMIT), so the message would outlive a"
                " rollback; use an engine without isolation_level='AUTOCOMMIT', or begin a transaction (with its own"
                " autocommit=True the driver commits every statement, too)"
            )
        # Whatever the handle is, what comes next is what writes.
        crash_point("outbox.before_insert")

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
        commits.prepare(engine)
        if self._dialect.prepare_engine is not None:
            self._dialect.prepare_engine(engine)

    def is_aborted(self, driver: Any) -> bool:
        """Whether COMMIT would be answered with a rollback."""
        return self._dialect.is_aborted(driver)

    def committed(self, sent: Sent, since: float) -> None:
        """Tell the listeners of a commit; what one of them raises is no reason not to tell the others."""
        for listener in self._listeners:
            try:
                listener.committed(sent, since)
            except Exception:
                logger.exception("a listener to commits failed; what it would have sent is found by a worker")
