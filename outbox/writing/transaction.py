"""The caller's transaction: finding it, making sure that it is one, and telling of its real end."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import psycopg
from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from outbox.errors import DatabaseError, NoTransactionError, TransactionAbortedError
from outbox.model.message import Message
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.store.database import Database
from outbox.store.dialects.dialect import Location, driver_of
from outbox.store.log.append import Appended
from outbox.telemetry.events import Committed, Listeners, RolledBack, Written
from outbox.writing import commit_hook as commits
from outbox.writing.handles import DriverConnection, Handle, refuse
from outbox.writing.sent import Sent

logger = logging.getLogger("outbox")


class AfterCommit(Protocol):
    """Acts on the commits of transactions with messages. It never blocks and never raises."""

    def committed(self, sent: Sent, since: float) -> None:
        """Act on a commit; `since`: a moment before it, by `clock`."""


class CallerTransaction(NamedTuple):
    """The transaction that a message is written in.

    `direct`: how many messages of it their writer will send so far; None: its commit is not noticed.
    """

    connection: DriverConnection
    direct: int | None


class Transactions:
    """Watches the transactions in which messages were sent."""

    def __init__(self, database: Database, *after_commit: AfterCommit, listeners: Listeners | None = None) -> None:
        """`after_commit`: those who act on a commit. `listeners`: those who are told of events."""
        self._database = database
        self._driving = database.dialect.driving
        self._after_commit = after_commit
        self._listeners = Listeners() if listeners is None else listeners
        #: Engines and drivers' own connections on which messages may be sent.
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._homes: list[Location | None] = []
        self.watch(database.engine)

    def transaction_of(self, handle: Handle, verb: str, *, flush: bool) -> CallerTransaction:
        """Return the transaction that the handle is in; `verb` is the method that was called with it.

        Raises:
            TypeError: `handle` is none of the accepted handles.
            NoTransactionError: the connection is in autocommit.
            DatabaseError: the handle is connected to another database, or by a driver that cannot be used; or the
                session's transaction spans several databases.
        """
        if isinstance(handle, Connection):
            connection = handle
        elif isinstance(handle, Session | scoped_session):
            session = handle() if isinstance(handle, scoped_session) else handle
            if flush and session.autoflush and not session._flushing:
                session.flush()
            connection = session.connection(bind_arguments={"clause": self._database.tables.message})
            _require_one_database(session)
        elif isinstance(handle, psycopg.Connection):
            self.require_driver(handle)
            return CallerTransaction(handle, None)
        else:
            raise refuse(handle, verb)
        if connection.engine not in self._known:
            self._require_usable(connection.engine)
            self._require_home(connection.engine)
            self._prepare(connection.engine)
        if not connection.in_transaction():
            connection.begin()
        sent = commits.sent_so_far(self, connection)
        self._require_transaction(driver_of(connection))
        return CallerTransaction(connection, 0 if sent is None else len(sent.direct))

    def connection_of(self, handle: Handle, verb: str, *, flush: bool) -> DriverConnection:
        """Return the connection that the handle's transaction is on; errors as those of `transaction_of`."""
        return self.transaction_of(handle, verb, flush=flush).connection

    def require_driver(self, driver: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
        """Make sure that psycopg's own connection is in a transaction of the right kind of database.

        Raises:
            NoTransactionError: it commits every statement by itself.
            DatabaseError: the outbox is not on PostgreSQL, or in another database.
        """
        if driver not in self._known:
            if "psycopg" not in self._driving.names:
                kind = self._database.dialect.name
                raise DatabaseError(f"the outbox is on {kind}, a psycopg connection is to PostgreSQL")
            self._require_home(driver)
            self._known.add(driver)
        self._require_transaction(driver)

    def sent(self, connection: DriverConnection | psycopg.AsyncConnection[Any], written: Appended) -> None:
        """Note that messages are part of this connection's transaction now, and tell the listeners."""
        watched = bool(written.messages) and bool(self._listeners)
        if isinstance(connection, Connection):
            commits.sent_by(self, connection).add(written, watched=watched)
        if watched:
            self._listeners.tell(Written(database=self._database, connection=connection, messages=written.messages))
        crash_point("outbox.after_insert")

    def wrote(self, connection: DriverConnection) -> None:
        """Note that something else is part of this connection's transaction now, of which listeners are not told."""
        if isinstance(connection, Connection):
            commits.sent_by(self, connection).more = True
        crash_point("outbox.after_insert")

    def before_commit(self, connection: Connection, do: Callable[[], None]) -> None:
        """Do something in this connection's transaction, right before its commit; what it raises ends the transaction.

        It is done after the session's flush, and after whatever else is done in the transaction.
        """
        sent = commits.sent_by(self, connection)
        sent.last.append(do)

    def running(self, connection: DriverConnection) -> Sent | None:
        """Return the object that stands for the running transaction, and for no other.

        None: nothing was sent in it, or the connection is a driver's own, whose transactions are not noticed.
        """
        if not isinstance(connection, Connection):
            return None
        try:
            return commits.sent_so_far(self, connection)
        except InvalidRequestError:
            # It is closed, or the server has closed it.
            return None

    def _require_transaction(self, driver: Any) -> None:
        if self._driving.is_aborted(driver):
            raise TransactionAbortedError(
                "a statement of this transaction failed, so nothing can be written in it any more; roll back, or use a"
                " savepoint around what may fail"
            )
        if self._driving.commits_every_statement(driver):
            raise NoTransactionError(
                "this connection commits every statement by itself (AUTOCOMMIT), so the message would outlive a"
                " rollback; use an engine without isolation_level='AUTOCOMMIT', or begin a transaction (with its own"
                " autocommit=True the driver commits every statement, too)"
            )
        # With every kind of handle the next statement is the one that writes.
        crash_point("outbox.before_insert")

    def watch(self, engine: Engine) -> None:
        """Notice the transactions on this engine, by which the outbox itself is reached, from their begin on.

        Raises:
            DatabaseError: it is to another kind of database, or by a driver that cannot be used.
        """
        if engine not in self._known:
            self._require_usable(engine)
            self._homes.append(self._driving.location(engine))
            self._prepare(engine)

    def _require_usable(self, engine: Engine) -> None:
        kind = self._database.dialect.name
        if engine.dialect.name != kind:
            raise DatabaseError(f"the outbox is on {kind}, this connection is to {engine.dialect.name}")
        if engine.dialect.driver not in self._driving.names:
            # psycopg serves engines that block and those that are awaited by the same URL.
            url = URL.create(self._driving.blocking, database=engine.url.database, host=engine.url.host)
            raise DatabaseError(
                f"{engine.dialect.driver} does not tell whether a transaction failed; write the engine's URL as"
                f" {url.set(port=engine.url.port).render_as_string()}"
            )

    def _require_home(self, found: Any) -> None:
        """Refuse an engine, or a driver's own connection, that surely leads to another database than the outbox's."""
        location = self._driving.location(found)
        if location is None:
            return
        others = [home.name for home in self._homes if home is not None and home.differs(location)]
        if len(others) == len(self._homes):
            raise DatabaseError(
                f"this connection is to the database {location.name}, and {self._database.described} is on"
                f" {others[-1]}, {self._database.elsewhere}"
            )

    def _prepare(self, engine: Engine) -> None:
        self._known.add(engine)
        # First, so that what it does to a commit is part of the commit that is noticed.
        if self._driving.prepare is not None:
            self._driving.prepare(engine)
        commits.prepare(engine, self._driving.is_aborted)

    def committed(self, sent: Sent, since: float) -> None:
        """Act on a commit, also if one of those who act raises, and tell the listeners."""
        for each in self._after_commit:
            try:
                each.committed(sent, since)
            except Exception:
                logger.exception("what follows a commit failed; what it would have sent is found by a worker")
        if sent.messages and self._listeners:
            messages, seconds = tuple(sent.messages), clock() - since
            self._listeners.tell(Committed(database=self._database, messages=messages, seconds=seconds))

    def rolled_back(self, messages: Sequence[Message]) -> None:
        """Tell the listeners of messages that are gone."""
        if messages and self._listeners:
            self._listeners.tell(RolledBack(database=self._database, messages=tuple(messages)))


# Several databases in one session


def _require_one_database(session: Session) -> None:
    """Refuse a session whose transaction consists of several, which are committed one after the other.

    Raises:
        DatabaseError: the session's transaction is open on other engines, too.
    """
    transaction = session.get_transaction()
    # Each connection has two entries: one by connection, one by engine.
    if transaction is not None and len(transaction._connections) > 2:
        _require_one_commit(transaction)


@event.listens_for(Session, "after_begin")
def _begun(_session: Session, transaction: SessionTransaction, _connection: Connection) -> None:
    """Refuse that a session which has sent a message begins on another database.

    It is refused before anything is written there: at the commit the first of them may be committed already. This event
    costs one call where a transaction begins, and nothing at a statement.
    """
    connections = transaction._connections
    if len(connections) > 2 and any(commits.has_sent(connection) for connection, *_ in connections.values()):
        _require_one_commit(transaction)


def _require_one_commit(transaction: SessionTransaction) -> None:
    # Engines that differ only in their options have connections of their own, too.
    connections = {connection for connection, *_ in transaction._connections.values()}
    if len(connections) > 1 and not transaction.session.twophase:
        raise DatabaseError(
            f"this session's transaction is open on {len(connections)} engines, which commit one after the other: a"
            " crash in between would keep the rows without the message, or the message without the rows; send in a"
            " session that uses one engine only, or make it with twophase=True"
        )
