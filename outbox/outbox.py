"""The outbox of an application: writes messages in transactions, and wakes workers after commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from outbox.errors import InvalidMessageError
from outbox.model.encoding import Tombstone, dumped
from outbox.model.limits import checked_dedup_key, require_window
from outbox.model.message import Message, MessageFields
from outbox.model.slots import SLOTS
from outbox.store.database import Database
from outbox.store.dialects.statements import Script
from outbox.store.log.append import Writing
from outbox.telemetry.events import Listener
from outbox.writing.bare import BareOutbox
from outbox.writing.engines import engine_of, own_engine_of
from outbox.writing.handles import Handle, is_async_driver, of_scope, require_async
from outbox.writing.scopes import Decorator, Propagation, Scopes, Transactional

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from sqlalchemy.ext.asyncio import AsyncSession

    from outbox.admin.admin import Admin
    from outbox.consumer.consumer import Consumer
    from outbox.consumer.options import ConsumerOptions
    from outbox.relay.relay import Relay
    from outbox.senders.opening import Destination
    from outbox.worker.shared import SharedSender
    from outbox.writing.engines import Bind
    from outbox.writing.handles import AsyncHandle

#: Bodies that an application's serializer does not get.
_AS_THEY_ARE = (str, bytes, bytearray, memoryview, Tombstone)

P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", bound=Listener)


class Outbox(BareOutbox):
    """Appends messages inside the caller's transactions.

    Args:
        bind: the engine of the database with the outbox tables, or a `sessionmaker` bound to it; or an `AsyncEngine` or
            an `async_sessionmaker`.
        schema: the tables' schema, if not the search path's first.
        slots: how many shares the key space has; fixed when the tables are made.
        dedup_window: for how long after a message with a dedup key no message with the same key is written.
        sender: the destination of `start` and `running`, unless they are given another one.
        worker_engine: the engine for threads of our own. Needed only beside an `AsyncEngine` whose URL alone does not
            say how to connect, or where `bind` leads to a pooler in transaction mode.
        dumps: a function that encodes bodies of `send` and `asend` that are neither bytes nor text. Replaces the
            encoder of `Message`, which knows no types of yours. The content type is `application/json` unless given.
    """

    def __init__(
        self,
        bind: Bind,
        *,
        schema: str | None = None,
        slots: int = SLOTS,
        dedup_window: timedelta = timedelta(days=7),
        sender: Destination | None = None,
        worker_engine: Engine | None = None,
        dumps: Callable[[Any], str | bytes] | None = None,
    ) -> None:
        require_window("dedup_window", dedup_window)
        self._dumps = dumps
        engine = worker_engine or engine_of(bind)
        super().__init__(Database(engine, schema, slots=slots))
        self._shared = None if sender is None or isinstance(sender, str) else _shared(sender)
        self._sender: Destination | None = self._shared or sender
        self._writing = Writing(self.database, dedup_window)
        self.transactions.watch(own_engine_of(bind) or engine)
        self._scopes = Scopes(bind, one_writer=self.database.dialect.locks.one_writer)
        #: The relays that run. Threads may start and stop at the same time: each takes from the list what it stops.
        self._relays: list[Relay] = []

    @property
    def engine(self) -> Engine:
        """The engine of the workers; for an AsyncEngine the blocking twin."""
        return self.database.engine

    # Writing

    def send(
        self, handle: Handle, topic: str, body: object, *, lock_key: bool = False, **fields: Unpack[MessageFields]
    ) -> UUID:
        """Append one message in the caller's transaction, and return its id.

        The INSERT is executed at once, on the caller's own connection: the message is committed or rolled back with the
        transaction. `send` commits nothing, rolls nothing back and opens no connection.

        A keyed send on a Session flushes first, so that the lock that orders the key is taken before the message gets
        its place in the log. On a Connection write the row first and send after. Where there is no row to lock, pass
        `lock_key=True` (PostgreSQL: an advisory lock until the transaction ends).

        Args:
            handle: a `Session`, a `scoped_session`, a Core `Connection` or a psycopg `Connection`, in a transaction.
            topic, body and fields: see `Message`. If the `dedup_key` was used within the window, nothing is written,
                and the id of the first message is returned.

        Raises:
            InvalidMessageError: a field breaks a limit; raised before any SQL.
            NoTransactionError: the connection commits every statement by itself.
            SchemaError: the tables are missing.
        """
        return self._write(handle, [self._message(topic, body, fields)], "send", lock_keys=lock_key)[0]

    def send_all(self, handle: Handle, messages: Iterable[Message], *, lock_keys: bool = False) -> list[UUID]:
        """Append any number of messages in few statements, and return their ids in order. The log keeps that order.

        Raises:
            InvalidMessageError: a message is in the list twice; and all errors of `send`.
        """
        return self._write(handle, _checked(messages, "send_all"), "send_all", lock_keys=lock_keys)

    async def asend(
        self, handle: AsyncHandle, topic: str, body: object, *, lock_key: bool = False, **fields: Unpack[MessageFields]
    ) -> UUID:
        """Do as `send`, on an AsyncSession, async_scoped_session or AsyncConnection, or psycopg's or asyncpg's own."""
        require_async(handle, "asend")
        return (await self._awrite(handle, [self._message(topic, body, fields)], lock_keys=lock_key))[0]

    async def asend_all(
        self, handle: AsyncHandle, messages: Iterable[Message], *, lock_keys: bool = False
    ) -> list[UUID]:
        """Do as `send_all`, on one of the handles of `asend`."""
        require_async(handle, "asend_all")
        return await self._awrite(handle, _checked(messages, "asend_all"), lock_keys=lock_keys)

    def withdraw(self, handle: Handle, message_id: UUID | None = None, *, dedup_key: str | None = None) -> bool:
        """Take a delayed message back in the caller's transaction, and return whether that is in time.

        True: if the transaction commits, nobody gets the message. Until the transaction ends, readers leave the message
        alone, also when it falls due. False: the message is due, so somebody may have it; or it is not delayed; or the
        outbox does not know it. The log keeps the message, and only purge removes it.

        Args:
            handle: as of `send`.
            message_id: the id that `send` returned. A dedup key of the message stays used.
            dedup_key: in place of the id: the key by which the message was sent. The key is free again.

        Raises:
            TypeError: neither an id nor a key is given, or both; and all errors of `send`.
        """
        steps = self._withdrawal(message_id, dedup_key)
        connection = self.transactions.connection_of(handle, "withdraw", flush=False)
        return self.database.execute(connection, steps)

    async def awithdraw(
        self, handle: AsyncHandle, message_id: UUID | None = None, *, dedup_key: str | None = None
    ) -> bool:
        """Do as `withdraw`, on one of the handles of `asend`."""
        require_async(handle, "awithdraw")
        if not is_async_driver(handle):
            in_time: bool = await of_scope(handle).run_sync(self.withdraw, message_id, dedup_key=dedup_key)
            return in_time
        steps = self._withdrawal(message_id, dedup_key)
        self.transactions.require_driver(handle)
        return await self.database.aexecute(handle, steps)

    # Transactions

    def begin(self, propagation: Propagation = "required") -> AbstractContextManager[Session]:
        """Open a session in a transaction that commits at the end.

        Inside another transaction of this outbox, "required" joins: there is one commit, at the outer end.
        "requires_new" opens a transaction in any case, with a commit of its own. "mandatory" raises if no transaction
        runs. A transaction belongs to one thread and one task. In another one that was started inside of it, as by
        `asyncio.wait_for`, pass the session, or say "requires_new"; the rest raises. The session is closed for good
        when its block ends.
        """
        return self._scopes.begin(propagation)

    def abegin(self, propagation: Propagation = "required") -> AbstractAsyncContextManager[AsyncSession]:
        """Do as `begin`, with an AsyncSession, on an AsyncEngine."""
        return self._scopes.abegin(propagation)

    @overload
    def transactional(
        self, function: Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, R]]
    ) -> Transactional[AsyncSession, P, Coroutine[Any, Any, R]]: ...
    @overload
    def transactional(self, function: Callable[Concatenate[Session, P], R]) -> Transactional[Session, P, R]: ...
    @overload
    def transactional(self, *, propagation: Propagation = "required") -> Decorator: ...
    def transactional(
        self, function: Callable[..., Any] | None = None, *, propagation: Propagation = "required"
    ) -> Any:
        """Make a function open a transaction, get its session as first argument, and commit at its end.

        Called inside another transaction of this outbox the function joins, unless `propagation` says otherwise (see
        `begin`). If the caller passes a session as first argument, nothing is opened or committed. Functions with
        `async` get an `AsyncSession`.
        """
        if function is None:
            return lambda given: self._scopes.wrap(given, propagation)
        return self._scopes.wrap(function, propagation)

    # Watching

    def listen(self, function: L) -> L:
        """Call a function with every event of this outbox (see `outbox.telemetry.events`), and return the function.

        The function is called on the thread of the event, which waits: be quick, and write nothing in the transaction.
        An exception of the function is logged once and disturbs nothing.

        Raises:
            TypeError: `function` is a coroutine function.
        """
        return self.listeners.listen(function)

    def wake(self) -> None:
        """Wake the workers of every process, after a commit that the outbox cannot see; harmless at any other moment.

        The outbox does so by itself after the commits of SQLAlchemy, and not after those of a driver's own connection.
        There workers find messages at their next poll, unless the application calls `wake`. Never blocks, never raises.
        """
        self.notifier.hint()

    def unlisten(self, function: Listener) -> None:
        """Stop calling a function of `listen`."""
        self.listeners.unlisten(function)

    # Operating

    @cached_property
    def admin(self) -> Admin:
        """The questions and orders of an operator: statuses, diagnosis, parked messages, subscriptions."""
        from outbox.admin.admin import Admin

        return Admin(self.database)

    # Handling

    def consumer(
        self,
        name: str,
        *,
        topics: Iterable[str] | None = None,
        tags: str | None = None,
        filter: str | None = None,
        ordered: bool | None = None,
        **options: Unpack[ConsumerOptions],
    ) -> Consumer:
        """Return a consumer of this outbox's messages, for the functions of `@consumer.on(…)`; see `Consumer`."""
        from outbox.consumer.consumer import Consumer

        return Consumer(self, name, topics=topics, tags=tags, filter=filter, ordered=ordered, **options)

    # Relaying within the application

    def start(self, sender: Destination | None = None, **options: Any) -> Relay:
        """Run a relay in a thread of this process, until `stop`; `options` are those of `Relay`.

        Several processes may do the same: one process at a time holds the lease. After a fork, start in the child.
        """
        destination = sender if sender is not None else self._sender
        if destination is None:
            raise TypeError("no destination: pass one, as Outbox(…, sender=…) or here")
        # Imported only here, because the import takes as long as all others together.
        from outbox.relay.relay import Relay

        relay = Relay(self, destination, **options)
        self.stop()
        # Appended last: another thread that stops a relay before its start would stop nothing.
        relay.start()
        self._relays.append(relay)
        return relay

    def stop(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """Let the relay of `start` finish the batch, and stop; do nothing without a relay."""
        with suppress(IndexError):
            while True:
                relay = self._relays.pop()
                relay.stop()
                relay.join(timeout.total_seconds())

    @contextmanager
    def running(self, sender: Destination | None = None, **options: Any) -> Iterator[Relay]:
        """Start a relay as `start` does; stop at the end of the block."""
        try:
            yield self.start(sender, **options)
        finally:
            self.stop()

    def close(self) -> None:
        """End the background threads of the outbox: relay and hints. The sender is closed.

        The application's engine stays open; its `dispose()`
        does not close the connections of the background threads.
        """
        self.stop()
        if self._shared is not None:
            self._shared.release()
        self.notifier.close()

    # How messages are written

    def _message(self, topic: str, body: object, fields: MessageFields) -> Message:
        if self._dumps is None or body is None or isinstance(body, _AS_THEY_ARE):
            return Message(topic, body, **fields)
        if fields.get("content_type") is None:
            fields = {**fields, "content_type": "application/json"}
        return Message(topic, dumped(self._dumps, body), **fields)

    def _write(self, handle: Handle, messages: Sequence[Message], verb: str = "send", *, lock_keys: bool) -> list[UUID]:
        if not messages:
            return []
        # A Connection has nothing to flush.
        flush = not isinstance(handle, Connection) and any(message.key is not None for message in messages)
        connection = self.transactions.connection_of(handle, verb, flush=flush)
        written = self.database.execute(connection, self._writing.append(messages, lock_keys=lock_keys))
        self.transactions.sent(connection, written)
        return written.message_ids

    def _withdrawal(self, message_id: UUID | None, dedup_key: str | None) -> Script[bool]:
        if dedup_key is not None and message_id is None:
            return self._writing.withdraw(checked_dedup_key(dedup_key))
        if not isinstance(message_id, UUID) or dedup_key is not None:
            raise TypeError("withdraw takes a message's id, which is a UUID, or its dedup_key, and not both")
        return self._writing.withdraw(message_id)

    async def _awrite(self, handle: Any, messages: Sequence[Message], *, lock_keys: bool) -> list[UUID]:
        if not is_async_driver(handle):
            # `run_sync` lets code for blocking connections run on an awaited connection, beside the event loop's stack.
            ids: list[UUID] = await of_scope(handle).run_sync(self._write, messages, lock_keys=lock_keys)
            return ids
        if not messages:
            return []
        self.transactions.require_driver(handle)
        written = await self.database.aexecute(handle, self._writing.append(messages, lock_keys=lock_keys))
        self.transactions.sent(handle, written)
        return written.message_ids


def _shared(sender: Destination) -> SharedSender:
    from outbox.senders.opening import open_sender
    from outbox.worker.shared import SharedSender

    return SharedSender(open_sender(sender))


def _checked(messages: Iterable[Message], verb: str) -> list[Message]:
    """Return the messages as a list, checked before any SQL."""
    if isinstance(messages, Message):  # type: ignore[unreachable]  # for those who do not check types
        raise TypeError(f"{verb} takes a list of messages; pass [message]")
    found = list(messages)
    for message in found:
        if not isinstance(message, Message):
            raise TypeError(f"{verb} takes Message objects, not {type(message).__name__}")
    # A repetition that has a dedup key is not written.
    ids = [message.message_id for message in found if message.dedup_key is None]
    if len(set(ids)) < len(ids):
        ((repeated, times),) = Counter(ids).most_common(1)
        limit = f"{repeated} is in the list {times} times, which inboxes and destinations would take for one message"
        raise InvalidMessageError("message_id", limit, "send a copy, which has an id of its own: message.replace()")
    return found
