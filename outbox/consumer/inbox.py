"""The inbox of a consumer: remembers handled messages, in the transaction of the work."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager, closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload, runtime_checkable
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from outbox.errors import NoTransactionError
from outbox.model.limits import require_window
from outbox.model.message import Message
from outbox.model.verdict import Reject, Retry, Unavailable, Verdict
from outbox.runtime.clock import clock
from outbox.store.database import Database
from outbox.store.failure import in_one_line
from outbox.store.idempotency.inbox import PRUNED_AT_ONCE, InboxDatabase, InboxRows, prune
from outbox.telemetry.events import EVERYWHERE, Listeners, Repeated
from outbox.telemetry.processing import processed
from outbox.writing.engines import engine_of, own_engine_of
from outbox.writing.handles import DriverConnection, Handle, is_async_driver, of_scope, require_async
from outbox.writing.scopes import Propagation, Scopes, require_plain_function
from outbox.writing.transaction import Transactions

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from outbox.writing.engines import Bind
    from outbox.writing.handles import AsyncHandle

logger = logging.getLogger("outbox")

MAX_CONSUMER = 255
#: So often a process deletes expired rows of a database that no relay may know.
PRUNE_SECONDS = 600.0
_ENDED = (
    "the inbox ends the transaction when the handler has returned: leave commit(), rollback() and close() out, and to"
    " roll back raise an error, or return a verdict"
)

M = TypeVar("M", bound=Message | UUID | str)
R = TypeVar("R")


@runtime_checkable
class Home(Protocol):
    """The part of an `Outbox` for an inbox: the database, transactions on it, and listeners."""

    database: Database
    listeners: Listeners

    def begin(self, propagation: Propagation = ...) -> AbstractContextManager[Session]:
        """Open a session in a transaction."""

    def abegin(self, propagation: Propagation = ...) -> AbstractAsyncContextManager[AsyncSession]:
        """Open an AsyncSession in a transaction."""


class Inbox:
    """Lets each message take effect once per consumer, however often it is delivered.

    The row that remembers a message is part of the consumer's transaction: they are committed together, or neither is.

    Args:
        bind: the consumer's engine, `sessionmaker`, or an async kind of either; or an `Outbox`, whose transactional
            functions then join the transaction of an idempotent handler.
        consumer: the consumer's name. Two consumers handle the same message once each.
        schema: the tables' schema, if not the first of the search path. An `Outbox` brings its own.
        retention: for how long a message is remembered, by the clock of the database. Not shorter than the time in
            which a message may come again, replayed dead letters included.
    """

    def __init__(
        self,
        bind: Bind | Home,
        consumer: str,
        *,
        schema: str | None = None,
        retention: timedelta = timedelta(days=7),
    ) -> None:
        require_window("retention", retention)
        self._consumer = checked_consumer(consumer)
        self._scopes: Home | Scopes
        self._listeners = bind.listeners if isinstance(bind, Home) else EVERYWHERE
        if isinstance(bind, Home):
            if schema not in (None, bind.database.schema):
                raise ValueError("an Outbox knows its schema; leave schema= out")
            self._database: Database = bind.database
            self._scopes = bind
            own_engine: Engine | None = None
        else:
            self._database = InboxDatabase(engine_of(bind), schema)
            self._scopes = Scopes(bind, one_writer=self._database.dialect.locks.one_writer)
            own_engine = own_engine_of(bind)
        # Not those of an Outbox: no worker has to be woken because a message was handled.
        self._transactions = Transactions(self._database)
        if own_engine is not None:
            self._transactions.watch(own_engine)
        self._rows = InboxRows(self._database, retention)
        #: When to delete expired rows; the relays of an Outbox do so by themselves.
        self._prune_at = math.inf if own_engine is None else clock() + PRUNE_SECONDS

    def once(self, handle: Handle, message: Message | UUID | str) -> bool:
        """Return whether the message is handled for the first time; it counts as handled when the transaction commits.

        While another transaction handles the same message, `once` waits for the end, as long as the caller's
        `lock_timeout` allows: committed means False here, rolled back means True. (Under REPEATABLE READ the database
        may raise its serialization error instead: repeat the transaction.)

        Args:
            handle: as for `Outbox.send`: a `Session`, `scoped_session`, `Connection` or psycopg `Connection`.
            message: the message, or its id as a UUID or as the text of a broker's header.

        Raises:
            NoTransactionError: the connection commits every statement by itself.
            SchemaError: the tables are missing.
        """
        connection = self._transactions.connection_of(handle, "once", flush=False)
        return self._note(connection, _id_of(message)) is not None

    async def aonce(self, handle: AsyncHandle, message: Message | UUID | str) -> bool:
        """Do as `once`, on one of the handles of `Outbox.asend`."""
        id = _id_of(message)
        require_async(handle, "aonce")
        if not is_async_driver(handle):
            return bool(await of_scope(handle).run_sync(self.once, id))
        self._transactions.require_driver(handle)
        noted = await self._database.aexecute(handle, self._rows.handle(self._consumer, id))
        self._tell(first=noted is not None)
        return noted is not None

    def _note(self, connection: DriverConnection, id: UUID) -> Any:
        """Note that a message is handled; return the moment the first time, and None after that."""
        noted = self._database.execute(connection, self._rows.handle(self._consumer, id))
        self._transactions.wrote(connection)
        self._tell(first=noted is not None)
        return noted

    def _tell(self, *, first: bool) -> None:
        """Tell of a repetition, and begin to delete expired rows if it is time: on a thread, so that nobody waits."""
        if clock() >= self._prune_at:
            self._prune_at = clock() + PRUNE_SECONDS
            threading.Thread(target=self._prune_quietly, name="outbox-inbox", daemon=True).start()
        if not first and self._listeners:
            self._listeners.tell(Repeated(database=self._database, consumer=self._consumer))

    @overload
    def idempotent(
        self, handler: Callable[[AsyncSession, M], Coroutine[Any, Any, R]]
    ) -> Callable[[M], Coroutine[Any, Any, R | None]]: ...
    @overload
    def idempotent(self, handler: Callable[[Session, M], R]) -> Callable[[M], R | None]: ...
    def idempotent(self, handler: Callable[..., Any]) -> Any:
        """Make a `handler(session, message)` a function of the message alone, which takes effect once.

        The function opens a transaction of its own, runs the handler in it, and commits. If the message was handled
        before, the function returns None without the handler. An exception of the handler rolls everything back.

        A verdict other than `Done` rolls back, too, because the message was not handled: a later delivery, as a retry
        or as the replay of a dead letter, is no repetition. Whatever a failed try is to keep belongs into another
        transaction. The handler must not end its transaction itself.

        The result is a destination for a `Relay`. With `async def` it is a coroutine function.
        """
        require_plain_function(handler, "a handler", "once()")
        awaits = inspect.iscoroutinefunction(handler)
        handle = processed(handler, self._consumer, awaited=awaits)
        if awaits:

            @functools.wraps(handler)
            async def awaited(message: Message | UUID | str) -> Any:
                return await self._ahandle(handle, message)

            return awaited

        @functools.wraps(handler)
        def called(message: Message | UUID | str) -> Any:
            return self._handle(handle, message)

        return called

    def _handle(self, handle: Callable[..., Any], message: Message | UUID | str) -> Any:
        handling: _Handling | None = None
        try:
            with self._scopes.begin("requires_new") as session:
                handling = self._begin(session, _id_of(message))
                if handling is None:
                    return None
                answer = _kept(handle(session, message))
                handling.end(session)
                return answer
        except BaseException as error:
            if handling is not None:
                with self._scopes.begin("requires_new") as session:
                    undone = handling.undo(session)
                _require(undone, error)
            return _verdict_of(error)

    async def _ahandle(self, handle: Callable[..., Any], message: Message | UUID | str) -> Any:
        handling: _Handling | None = None
        try:
            async with self._scopes.abegin("requires_new") as session:
                handling = await session.run_sync(self._begin, _id_of(message))
                if handling is None:
                    return None
                answer = _kept(await handle(session, message))
                await session.run_sync(handling.end)
                return answer
        except (Exception, asyncio.CancelledError) as error:
            if handling is not None:
                async with self._scopes.abegin("requires_new") as session:
                    undone = await session.run_sync(handling.undo)
                _require(undone, error)
            return _verdict_of(error)

    def _begin(self, session: Session, id: UUID) -> _Handling | None:
        """Note a message at the beginning of its transaction; None: it was handled before."""
        connection = self._transactions.connection_of(session, "once", flush=False)
        assert isinstance(connection, Connection)
        noted = self._note(connection, id)
        if noted is None:
            return None

        def forget(connection: DriverConnection) -> bool:
            return self._database.execute(connection, self._rows.forget(self._consumer, id, noted))

        return _Handling(self._transactions, session, connection, forget)

    def prune(self) -> int:
        """Delete the rows whose retention is over, and return their number.

        Relays of the same database prune by themselves, and so does a process with an inbox, every ten minutes. The
        method uses small transactions on a connection of its own, and blocks: in an event loop use `asyncio.to_thread`.
        """
        pruned = 0
        with closing(self._database.open_plainly()) as channel, self._database.explained():
            while True:
                portion = prune(channel)
                pruned += portion
                if portion < PRUNED_AT_ONCE:
                    return pruned

    def _prune_quietly(self) -> None:
        try:
            self.prune()
        except Exception as error:
            logger.info("expired rows of the inbox stay for now: %s", in_one_line(error, self._database.commands)[0])


class _Undone(Exception):  # noqa: N818 - not an error: it rolls a transaction back
    """A handler's verdict on a message that was not handled."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


def _kept(answer: R) -> R:
    """Return the handler's answer; raise if the transaction must not be committed."""
    if isinstance(answer, Retry | Reject | Unavailable):
        raise _Undone(answer)
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError("the handler returned a coroutine, which nobody awaits; write async def")
    return answer


class _Handling:
    """The transaction of one message, which a handler must not end.

    After a commit the message would count as handled, whatever the rest of the handler does; after a rollback or a
    close its effects would be gone, and nobody would know. SQLAlchemy's commits are refused before they happen. What
    only the driver saw is found at the end.
    """

    def __init__(
        self,
        transactions: Transactions,
        session: Session,
        connection: Connection,
        forget: Callable[[DriverConnection], bool],
    ) -> None:
        """`forget`: takes back that the message is handled; returns False if that is not stored."""
        self._transactions = transactions
        self._connection = connection
        self._forget = forget
        self._root = session.get_transaction()
        self._sent = transactions.running(connection)
        self._returned = False
        transactions.before_commit(connection, self._refuse)

    def _refuse(self) -> None:
        if not self._returned:
            raise NoTransactionError(_ENDED)

    def end(self, session: Session) -> None:
        """Allow the commit, if the transaction is that of the beginning."""
        same = session.get_transaction() is self._root and self._transactions.goes_on(self._connection, self._sent)
        if not same:
            raise NoTransactionError(_ENDED)
        self._returned = True

    def undo(self, session: Session) -> bool:
        """Take back that the message is handled, after a failure; return False if the handler had committed it.

        After an allowed commit without an answer the message may count as handled.
        """
        return self._returned or not self._forget(self._transactions.connection_of(session, "once", flush=False))


def _require(undone: bool, error: BaseException) -> None:  # noqa: FBT001
    """Raise if the transaction of a failed handler was committed."""
    if not undone:
        raise NoTransactionError(_ENDED) from error


def _verdict_of(error: BaseException) -> Verdict:
    """Return the verdict of a handler that rolled back; raise any other error."""
    if isinstance(error, _Undone):
        return error.verdict
    raise error


def checked_consumer(consumer: str) -> str:
    """Return the name of a consumer; refuse a name that cannot be stored or shown."""
    if not isinstance(consumer, str):
        raise TypeError(f"consumer must be a str, not {type(consumer).__name__}")
    storable = consumer.isprintable() and 1 <= len(consumer) <= MAX_CONSUMER
    if not storable:
        raise ValueError(f"consumer {consumer!a:.40} must be 1 to {MAX_CONSUMER} printable characters")
    return consumer


def _id_of(message: Message | UUID | str) -> UUID:
    if isinstance(message, Message):
        return message.message_id
    if isinstance(message, UUID):
        return message
    if not isinstance(message, str):
        raise TypeError(f"message must be a Message, or its id as a UUID or a str, not {type(message).__name__}")
    try:
        return UUID(message)
    except ValueError as error:
        raise ValueError(f"{message!a:.60} is not a message id, which is a UUID") from error
