"""The caller's transaction: finding it, making sure that it is one, and noticing its real commit.

That is where SQLAlchemy's dialect commits the driver's connection: never for a savepoint, nor for a session inside of
somebody else's transaction, and what comes after it can see what was committed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import psycopg
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.pool import Pool

from outbox.errors import DatabaseError, NoTransactionError, TransactionAbortedError
from outbox.faults import crash_point
from outbox.handles import Handle, Link, refuse
from outbox.store.database import Database
from outbox.store.writing import Place, Sent
from outbox.worker.keeper import clock

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
        self._wrapped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        # Key in a connection's `info`: what was sent in the running transaction. Each outbox has its own, because an
        # engine may serve several.
        self._sent = object()
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

    def sent(
        self, link: Link | psycopg.AsyncConnection[Any], direct: Sequence[Place] = (), *, more: bool = True
    ) -> None:
        """Messages are part of this connection's transaction now; `direct`: those that their writer will send."""
        if isinstance(link, Connection):
            sent = link.info.get(self._sent)
            if sent is None:
                sent = link.info[self._sent] = Sent()
            sent.direct.extend(direct)
            sent.more = sent.more or more
        crash_point("outbox.after_insert")

    def expected_of(self, connection: Connection) -> int:
        """How many messages of the running transaction their writer will send."""
        sent: Sent | None = connection.info.get(self._sent)
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
        if engine.dialect not in self._wrapped:
            # Engines with other execution options share it.
            self._wrapped.add(engine.dialect)
            self._wrap(engine.dialect)
        if engine.pool not in self._pools:
            self._pools.add(engine.pool)
            event.listen(engine.pool, "checkin", self._returned)
        if self._dialect.prepare_engine is not None:
            self._dialect.prepare_engine(engine)

    def _wrap(self, dialect: Any) -> None:
        """Stand around what this engine's dialect does when a transaction really ends.

        Not by events of the engine: with a single one SQLAlchemy looks for listeners at every statement of the
        application, and none comes after the commit.
        """
        commit, roll_back = dialect.do_commit, dialect.do_rollback
        prepare, commit_prepared = dialect.do_prepare_twophase, dialect.do_commit_twophase
        roll_back_prepared = dialect.do_rollback_twophase

        def do_commit(link: Any) -> None:
            with self._committing(link):
                commit(link)

        def do_rollback(link: Any) -> None:
            self._forget(link)
            roll_back(link)

        def do_prepare_twophase(connection: Connection, xid: Any) -> None:
            self._require_sound(connection.connection)
            prepare(connection, xid)

        def do_commit_twophase(connection: Connection, xid: Any, *how: Any, **more: Any) -> None:
            with self._committing(connection.connection, "tpc_rollback"):
                commit_prepared(connection, xid, *how, **more)

        def do_rollback_twophase(connection: Connection, xid: Any, *how: Any, **more: Any) -> None:
            self._forget(connection.connection)
            roll_back_prepared(connection, xid, *how, **more)

        for each in (do_commit, do_rollback, do_prepare_twophase, do_commit_twophase, do_rollback_twophase):
            setattr(dialect, each.__name__, each)

    @contextmanager
    def _committing(self, link: Any, roll_back: str = "rollback") -> Iterator[None]:
        """Around the real commit; `roll_back` is the driver's word for the contrary."""
        info = _info_of(link)
        if self._sent not in info:
            yield
            return
        try:
            self._require_sound(link)
        except TransactionAbortedError:
            # From here on SQLAlchemy holds the transaction for ended, and a Connection would stay in the aborted one.
            del info[self._sent]
            getattr(link.dbapi_connection, roll_back)()
            raise
        sent, since = info.pop(self._sent), clock()
        crash_point("outbox.before_commit")
        yield
        crash_point("outbox.after_commit")
        self._tell(sent, since)

    def _require_sound(self, link: Any) -> None:
        """PostgreSQL answers the commit of a failed transaction with a rollback, and no driver tells."""
        if self._sent in _info_of(link) and self._dialect.is_aborted(link.driver_connection):
            raise TransactionAbortedError(
                "a statement of this transaction failed, so its COMMIT would silently become a ROLLBACK and the message"
                " would be lost; roll back, or use a savepoint around what may fail"
            )

    def _returned(self, _driver: object, record: Any) -> None:
        """Back in the pool, however its transaction ended."""
        record.info.pop(self._sent, None)

    def _forget(self, link: Any) -> None:
        _info_of(link).pop(self._sent, None)

    def _tell(self, sent: Sent, since: float) -> None:
        for listener in self._listeners:
            try:
                listener.committed(sent, since)
            except Exception:
                # It would reach the application although everything is committed.
                logger.exception("a listener to commits failed; what it would have sent is found by a worker")


def _info_of(link: Any) -> dict[Any, Any]:
    """What is remembered of a connection: nothing of one that is lost, or that the pool is only trying out."""
    try:
        info: dict[Any, Any] = link.info
    except (NotImplementedError, InvalidRequestError):
        return {}
    return info
