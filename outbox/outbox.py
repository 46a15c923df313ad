"""The outbox of an application: messages go into its own transaction, and workers are told after its commit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from outbox.errors import DatabaseError
from outbox.hints import Hints
from outbox.message import Message
from outbox.relay import Destination, Relay
from outbox.schema import SLOTS
from outbox.store.database import Database
from outbox.store.dialect import Dialect
from outbox.store.log import Log
from outbox.transactions import Handle, Transactions

P = ParamSpec("P")
R = TypeVar("R")


class Outbox:
    """Appends messages inside the caller's transactions.

    Args:
        bind: the engine of the database that holds the outbox tables, or a `sessionmaker` bound to it.
        schema: the tables' schema, if not the search path's first.
        slots: how many shares the key space has; fixed when the tables are made.
    """

    def __init__(
        self,
        bind: Engine | sessionmaker[Session],
        *,
        schema: str | None = None,
        slots: int = SLOTS,
        dialect: Dialect | None = None,
    ) -> None:
        # What a transactional function returns is used after its commit.
        self._sessions = bind if isinstance(bind, sessionmaker) else sessionmaker(bind, expire_on_commit=False)
        engine = bind.kw.get("bind") if isinstance(bind, sessionmaker) else bind
        if not isinstance(engine, Engine):
            raise DatabaseError(f"Outbox needs an Engine or a sessionmaker bound to one, not {type(bind).__name__}")
        self.database = Database(engine, schema, slots=slots, dialect=dialect)
        self.hints = Hints(self.database)
        self._log = Log(self.database)
        self._transactions = Transactions(self.database, self.hints)
        self._relay: Relay | None = None
        self._current: ContextVar[Session | None] = ContextVar("outbox_session", default=None)

    @property
    def engine(self) -> Engine:
        """The engine of the database that holds the tables."""
        return self.database.engine

    def send(
        self,
        handle: Handle,
        topic: str,
        body: object,
        *,
        key: str | None = None,
        tags: str | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
        deliver_at: datetime | None = None,
        delay: timedelta | None = None,
        expires_at: datetime | None = None,
        lock_key: bool = False,
    ) -> UUID:
        """Append one message in the caller's transaction, and return its id.

        The INSERT is executed at once, on the caller's own connection: what happens to the transaction happens to the
        message. Nothing is committed, rolled back or connected to. A keyed send on a Session flushes first, so that
        the lock that orders the key is taken before the message draws its place; on a Connection write the row first
        and send after, or pass `lock_key=True` where there is no row to lock (PostgreSQL: an advisory lock until the
        transaction ends).

        Args:
            handle: a `Session`, a `scoped_session` or a Core `Connection`, in a transaction.
            topic, body and the rest: see `Message`.

        Raises:
            InvalidMessageError: before any SQL, naming field, limit and fix.
            NoTransactionError: the connection commits every statement by itself.
            SchemaError: the tables are not there.
        """
        message = Message(
            topic,
            body,
            key=key,
            tags=tags,
            headers=headers,
            content_type=content_type,
            deliver_at=deliver_at,
            delay=delay,
            expires_at=expires_at,
        )
        self._append(handle, [message], lock_key=lock_key)
        return message.message_id

    def send_all(self, handle: Handle, messages: Sequence[Message]) -> list[UUID]:
        """Append many messages in one statement; their ids come back in order, which is also their order in the log."""
        messages = list(messages)
        for message in messages:
            if not isinstance(message, Message):
                raise TypeError(f"send_all takes Message objects, not {type(message).__name__}")
        if messages:
            self._append(handle, messages)
        return [message.message_id for message in messages]

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """A session in a transaction that commits at the end, or the one of this outbox that is running already."""
        running = self._current.get()
        if running is not None:
            yield running
            return
        with self._sessions.begin() as session:
            token = self._current.set(session)
            try:
                yield session
            finally:
                self._current.reset(token)

    def transactional(self, function: Callable[Concatenate[Session, P], R]) -> Callable[P, R]:
        """A function that opens a transaction, gets its session as first argument, and commits when it returns.

        Called inside another one of the same outbox it joins that transaction; what is returned or raised is the
        caller's. Passing a session explicitly is a matter of calling `function.__wrapped__(session, …)`.
        """

        @functools.wraps(function)
        def in_transaction(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.begin() as session:
                return function(session, *args, **kwargs)

        return in_transaction

    def start(self, sender: Destination, **options: Any) -> Relay:
        """Run a relay in a thread of this process, until `stop`; `options` are those of `Relay`.

        Several processes may do the same: one of them at a time holds the lease. After a fork call it in the child.
        """
        self.stop()
        self._relay = Relay(self, sender, **options)
        self._relay.start()
        return self._relay

    def stop(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """Let the relay of `start` finish what is under way; without one nothing happens."""
        if self._relay is not None:
            self._relay.stop()
            self._relay.join(timeout.total_seconds())
            self._relay = None

    def close(self) -> None:
        """End what this outbox runs in the background: its relay, and the connection that its hints go out on.

        The engine is the application's; `engine.dispose()` does not know of that connection.
        """
        self.stop()
        self.hints.close()

    @contextmanager
    def running(self, sender: Destination, **options: Any) -> Iterator[Relay]:
        """`start` and `stop` around an application."""
        try:
            yield self.start(sender, **options)
        finally:
            self.stop()

    def _append(self, handle: Handle, messages: list[Message], *, lock_key: bool = False) -> None:
        keyed = [message.key for message in messages if message.key is not None]
        connection = self._transactions.connection_of(handle, flush=bool(keyed))
        if lock_key:
            self._transactions.lock_keys(connection, keyed)
        with self.database.explained():
            self._log.append(connection, messages)
        self._transactions.sent(connection)
