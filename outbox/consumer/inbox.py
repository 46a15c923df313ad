"""The inbox of a consumer: remembers handled messages, in the transaction of the work."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload, runtime_checkable
from uuid import UUID

from sqlalchemy import Engine, event
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
from outbox.writing.handles import Handle, is_async_driver, of_scope, require_async
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
        id = _id_of(message)
        connection = self._transactions.connection_of(handle, "once", flush=False)
        first = self._database.execute(connection, self._rows.handle(self._consumer, id))
        self._transactions.wrote(connection)
        return self._told(first=first)

    async def aonce(self, handle: AsyncHandle, message: Message | UUID | str) -> bool:
        """Do as `once`, on one of the handles of `Outbox.asend`."""
        id = _id_of(message)
        require_async(handle, "aonce")
        if not is_async_driver(handle):
            return bool(await of_scope(handle).run_sync(self.once, id))
        self._transactions.require_driver(handle)
        return self._told(first=await self._database.aexecute(handle, self._rows.handle(self._consumer, id)))

    def _told(self, *, first: bool) -> bool:
        """Tell of a repetition, and begin to delete expired rows if it is time: on a thread, so that nobody waits."""
        if clock() >= self._prune_at:
            self._prune_at = clock() + PRUNE_SECONDS
            threading.Thread(target=self._prune_quietly, name="outbox-inbox", daemon=True).start()
        if not first and self._listeners:
            self._listeners.tell(Repeated(database=self._database, consumer=self._consumer))
        return first

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
                try:
                    async with self._scopes.abegin("requires_new") as session:
                        if await self.aonce(session, message):
                            with _kept_open(session.sync_session):
                                return _kept(await handle(session, message))
                except _Undone as undone:
                    return undone.verdict

            return awaited

        @functools.wraps(handler)
        def called(message: Message | UUID | str) -> Any:
            try:
                with self._scopes.begin("requires_new") as session:
                    if self.once(session, message):
                        with _kept_open(session):
                            return _kept(handle(session, message))
            except _Undone as undone:
                return undone.verdict

        return called

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
            logger.info("expired rows of the inbox stay for now: %s", in_one_line(error)[0])


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


@contextmanager
def _kept_open(session: Session) -> Iterator[None]:
    """Refuse that a handler ends its transaction.

    After a commit the message would count as handled, whatever the rest of the handler does; after a rollback or a
    close its effects would be gone, and nobody would know.
    """
    transaction = session.get_transaction()

    def refuse(session: Session) -> None:
        if not session.in_nested_transaction():
            raise NoTransactionError(_ENDED)

    event.listen(session, "before_commit", refuse)
    try:
        yield
    finally:
        event.remove(session, "before_commit", refuse)
    if session.get_transaction() is not transaction:
        raise NoTransactionError(_ENDED)


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
