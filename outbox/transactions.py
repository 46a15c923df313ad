"""The caller's transaction: finding it, making sure that it is one, and noticing its real commit.

Everything hangs on the engine's own events. `commit` fires once for the real commit, right before it, and never for a
savepoint or for a session inside somebody else's transaction; the connection's return to the pool comes right after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.orm import Session, scoped_session

from outbox.errors import NoTransactionError, TransactionAbortedError
from outbox.faults import crash_point
from outbox.hints import Hints
from outbox.store import postgresql, sqlite
from outbox.store.database import Database

Handle = Session | scoped_session[Session] | Connection


class Transactions:
    """Watches the transactions in which messages were sent."""

    def __init__(self, database: Database, hints: Hints) -> None:
        self._database = database
        self._hints = hints
        self._watched: weakref.WeakSet[Engine] = weakref.WeakSet()
        # Keys in a connection's `info`: messages were sent in the running transaction; in the one committed last.
        # Each outbox has its own, because an engine may serve several.
        self._sent, self._committed = object(), object()
        self._watch(database.engine)

    def connection_of(self, handle: Handle, *, flush: bool) -> Connection:
        """The connection that the handle's transaction is on.

        Raises:
            TypeError: it is none of the accepted handles.
            NoTransactionError: the connection is in autocommit.
        """
        if isinstance(handle, Connection):
            connection = handle
        elif isinstance(handle, Session | scoped_session):
            session = handle() if isinstance(handle, scoped_session) else handle
            if flush and session.autoflush:
                session.flush()
            connection = session.connection(bind_arguments={"clause": self._database.tables.message})
        else:
            raise TypeError(f"send takes a Session, a scoped_session or a Connection, not {type(handle).__name__}")
        self._require_transaction(connection)
        if connection.engine not in self._watched:
            self._watch(connection.engine)
        return connection

    def lock_keys(self, connection: Connection, keys: Sequence[str]) -> None:
        """Serialise the writers of these keys until the transaction ends, in an order that cannot deadlock."""
        if self._database.dialect.name == "postgresql":
            for key in sorted(set(keys)):
                connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": key})

    def sent(self, connection: Connection) -> None:
        """Messages are part of this connection's transaction now."""
        connection.info[self._sent] = True
        crash_point("outbox.after_insert")

    def _require_transaction(self, connection: Connection) -> None:
        if not connection.in_transaction():
            connection.begin()
        driver: Any = connection.connection.driver_connection
        module = postgresql if self._database.dialect.name == "postgresql" else sqlite
        if module.commits_every_statement(driver):
            raise NoTransactionError(
                "this connection commits every statement by itself (AUTOCOMMIT), so the message would outlive a"
                " rollback; use an engine without isolation_level='AUTOCOMMIT', or begin a transaction"
            )

    def _watch(self, engine: Engine) -> None:
        self._watched.add(engine)
        event.listen(engine, "commit", self._before_commit)
        event.listen(engine, "rollback", self._forget)
        event.listen(engine, "prepare_twophase", lambda connection, _xid: self._require_sound(connection))
        event.listen(engine, "commit_twophase", lambda connection, *_: self._before_commit(connection, "tpc_rollback"))
        event.listen(engine, "rollback_twophase", lambda connection, *_: self._forget(connection))
        event.listen(engine, "checkin", self._returned)
        if engine.dialect.name == "sqlite":
            sqlite.begin_before_savepoint(engine)

    def _before_commit(self, connection: Connection, roll_back: str = "rollback") -> None:
        """The real commit comes next; `roll_back` is the driver's word for the contrary."""
        if not connection.info.get(self._sent, False):
            return
        try:
            self._require_sound(connection)
        except TransactionAbortedError:
            # From here on SQLAlchemy holds the transaction for ended, and a Connection would stay in the aborted one.
            connection.info.pop(self._sent)
            getattr(connection.connection.driver_connection, roll_back)()
            raise
        del connection.info[self._sent]
        crash_point("outbox.before_commit")
        connection.info[self._committed] = True
        # A connection that its owner keeps will not be returned: then a moment's delay has to do.
        self._hints.expect(id(connection.info))

    def _require_sound(self, connection: Connection) -> None:
        """PostgreSQL answers the commit of a failed transaction with a rollback, and no driver tells."""
        driver: Any = connection.connection.driver_connection
        postgres = self._database.dialect.name == "postgresql"
        if postgres and connection.info.get(self._sent, False) and postgresql.is_aborted(driver):
            raise TransactionAbortedError(
                "a statement of this transaction failed, so its COMMIT would silently become a ROLLBACK and the message"
                " would be lost; roll back, or use a savepoint around what may fail"
            )

    def _returned(self, _driver: object, record: Any) -> None:
        """Back in the pool: what it committed is visible now."""
        record.info.pop(self._sent, None)
        if record.info.pop(self._committed, False):
            crash_point("outbox.after_commit")
            self._hints.hint(id(record.info))

    def _forget(self, connection: Connection) -> None:
        # A lost connection has nothing to forget, and asking it would raise in the application's rollback.
        if not connection.invalidated:
            connection.info.pop(self._sent, None)
