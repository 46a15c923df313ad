"""The caller's transaction: finds and checks the transaction of a handle, and acts on its real end."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, Table, event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from outbox.errors import DatabaseError, NoTransactionError, TransactionAbortedError
from outbox.model.message import Message
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.schema import tables
from outbox.store.database import FAILED, Database
from outbox.store.dialects.dialect import Location, driver_of
from outbox.store.log.append import Appended
from outbox.telemetry.events import Committed, Listeners, RolledBack, Written
from outbox.writing import commit_hook as commits
from outbox.writing.handles import DriverConnection, Handle, is_driver, refuse
from outbox.writing.sent import Sent

if TYPE_CHECKING:
    from outbox.writing.handles import AsyncDriver, Driver

logger = logging.getLogger("outbox")


#: Acts on the commit of a transaction with messages, and never blocks; takes what was sent.
AfterCommit = Callable[[Sent], None]


class Transactions:
    """Watches the transactions in which messages were sent."""

    def __init__(self, database: Database, *after_commit: AfterCommit, listeners: Listeners | None = None) -> None:
        """`listeners`: get the events."""
        self.database = database
        self._log = tables(database.schema, database.dialect.name).message
        self._driving = database.dialect.driving
        self._after_commit = after_commit
        self._listeners = Listeners() if listeners is None else listeners
        #: Engines and drivers' own connections on which messages may be sent.
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._homes: list[Location | None] = []
        self.watch(database.engine)

    def connection_of(self, handle: Handle, verb: str, *, flush: bool) -> DriverConnection:
        """Return the connection of the handle's transaction; `verb`: the method that the application has called."""
        if isinstance(handle, Connection):
            connection = handle
        elif isinstance(handle, Session | scoped_session):
            session = handle() if isinstance(handle, scoped_session) else handle
            if flush and session.autoflush and not session._flushing:
                session.flush()
            connection = _connection_of(session, self._log)
            _require_one_database(session)
        elif is_driver(handle):
            self.require_driver(handle)
            return handle
        else:
            raise refuse(handle, verb)
        engine = connection.engine
        if engine is not self.database.engine and engine not in self._known:
            self._require_usable(engine)
            self._require_home(engine)
            self._prepare(engine)
        if not connection.in_transaction():
            connection.begin()
        self._require_transaction(driver_of(connection))
        return connection

    def require_driver(self, driver: Driver | AsyncDriver) -> None:
        """Require a driver's own connection to be in a transaction, on the outbox's database."""
        if driver not in self._known:
            name = type(driver).__module__.partition(".")[0]
            if name not in self._driving.own:
                kind = self.database.dialect.name
                raise DatabaseError(f"the outbox is on {kind}, where no connection of {name} leads")
            self._require_home(driver)
            # Connections of sqlite3, and those that asyncpg's pool lends, are objects without weak references.
            with suppress(TypeError):
                self._known.add(driver)
        self._require_transaction(driver)

    def sent(self, connection: DriverConnection | AsyncDriver, written: Appended) -> None:
        """Note messages written in the connection's transaction, and tell the listeners."""
        watched = bool(written.messages) and bool(self._listeners)
        if isinstance(connection, Connection):
            commits.sent_by(self, connection).add(written.messages, watched=watched)
        if watched:
            self._listeners.tell(Written(database=self.database, connection=connection, messages=written.messages))
        crash_point("outbox.after_insert")

    def wrote(self, connection: DriverConnection) -> None:
        """Note a write in this connection's transaction that needs a hint, and is no event."""
        if isinstance(connection, Connection):
            commits.sent_by(self, connection).needs_hint = True
        crash_point("outbox.after_insert")

    def before_commit(self, connection: Connection, do: Callable[[], None]) -> None:
        """Call `do` right before the commit of the connection's transaction, after the session's flush.

        An exception that `do` raises ends the transaction.
        """
        commits.sent_by(self, connection).last.append(do)

    def running(self, connection: DriverConnection) -> Sent | None:
        """Return the object that stands for the running transaction, and for no other transaction.

        None: nothing was sent so far, or the connection is a driver's own, whose transactions are not noticed.
        """
        return commits.sent_so_far(self, connection) if isinstance(connection, Connection) else None

    def goes_on(self, connection: Connection, sent: Sent | None) -> bool:
        """Return whether the connection is still in the transaction for which `running` returned `sent`.

        A COMMIT that only the driver saw is noticed until the driver begins the next transaction.
        """
        return self.running(connection) is sent and self._driving.in_transaction(driver_of(connection))

    def _require_transaction(self, driver: Any) -> None:
        if self._driving.is_aborted(driver):
            raise TransactionAbortedError(FAILED)
        if self._driving.commits_every_statement(driver):
            raise NoTransactionError(
                "this connection commits every statement by itself (AUTOCOMMIT), so the message would outlive a"
                " rollback; use an engine without isolation_level='AUTOCOMMIT', or begin a transaction (with its own"
                " autocommit=True the driver commits every statement, too)"
            )
        # With every kind of handle the next statement is the one that writes.
        crash_point("outbox.before_insert")

    def watch(self, engine: Engine) -> None:
        """Notice the transactions on an engine of the outbox's own database."""
        if engine not in self._known:
            self._require_usable(engine)
            self._homes.append(self._driving.location(engine))
            self._prepare(engine)

    def _require_usable(self, engine: Engine) -> None:
        kind = self.database.dialect.name
        if engine.dialect.name != kind:
            raise DatabaseError(
                f"the outbox is on {kind}, this connection is to {engine.dialect.name}; use an Outbox on the database"
                " that the transaction writes to"
            )
        if engine.dialect.driver not in self._driving.names:
            # One URL of psycopg serves blocking and awaited engines.
            url = URL.create(kind, host=engine.url.host, port=engine.url.port, database=engine.url.database)
            raise DatabaseError(
                f"the driver {engine.dialect.driver} is not known to tell whether a transaction failed; write the"
                f" engine's URL as {self._driving.blocking_url(url).render_as_string()}"
            )

    def _require_home(self, found: Any) -> None:
        """Refuse an engine, or a driver's own connection, if it surely leads to another database than the outbox's."""
        location = self._driving.location(found)
        if location is None:
            return
        others = [home.name for home in self._homes if home is not None and home.differs(location)]
        if len(others) == len(self._homes):
            raise DatabaseError(
                f"this connection is to the database {location.name}, and {self.database.described} is on"
                f" {others[-1]}, {self.database.elsewhere}"
            )

    def _prepare(self, engine: Engine) -> None:
        self._known.add(engine)
        # First, so that the noticed commit includes all that the dialect adds to a commit.
        if self._driving.prepare is not None:
            self._driving.prepare(engine)
        commits.prepare(engine, self._driving)

    def committed(self, sent: Sent, since: float) -> None:
        """Act on a commit, and tell the listeners; an exception stops no other action."""
        for act in self._after_commit:
            try:
                act(sent)
            except Exception:
                logger.exception("an action after a commit failed; a worker finds the messages")
        if sent.messages and self._listeners:
            messages, seconds = tuple(sent.messages), clock() - since
            self._listeners.tell(Committed(database=self.database, messages=messages, seconds=seconds))

    def rolled_back(self, messages: Sequence[Message]) -> None:
        """Tell the listeners of rolled-back messages."""
        if messages and self._listeners:
            self._listeners.tell(RolledBack(database=self.database, messages=tuple(messages)))


def _connection_of(session: Session, table: Table) -> Connection:
    try:
        return session.connection(bind_arguments={"clause": table})
    except InvalidRequestError as error:
        if "permanently closed" not in str(error):
            raise
        raise NoTransactionError(
            "this session is closed: the transaction ended with the block; send inside of the block, or in another"
        ) from None


# Several databases in one session


def _require_one_database(session: Session) -> None:
    """Refuse a session whose transaction is open on several engines, which commit one after the other."""
    transaction = session.get_transaction()
    # Each connection has two entries: one by connection, one by engine.
    if transaction is not None and len(transaction._connections) > 2:
        _require_one_commit(transaction)


@event.listens_for(Session, "after_begin")
def _begun(_session: Session, transaction: SessionTransaction, _connection: Connection) -> None:
    """Refuse that a session with a sent message begins on another database.

    Refused before any write there, because at the commit the first database may be committed already. This event costs
    one call where a transaction begins, and nothing at a statement.
    """
    connections = transaction._connections
    if len(connections) > 2 and any(commits.has_sent(connection) for connection, *_ in connections.values()):
        _require_one_commit(transaction)


def _require_one_commit(transaction: SessionTransaction) -> None:
    # Engines that differ only in their options have different connections, too.
    connections = {connection for connection, *_ in transaction._connections.values()}
    if len(connections) > 1 and not transaction.session.twophase:
        raise DatabaseError(
            f"this session's transaction is open on {len(connections)} engines, which commit one after the other: a"
            " crash in between would keep the rows without the message, or the message without the rows; send in a"
            " session that uses one engine only, or make it with twophase=True"
        )
