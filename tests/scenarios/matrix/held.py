"""One way of holding a transaction for all of them: the same verbs, whether statements block or are awaited.

Scenarios are written once, as coroutines. On a handle that blocks nothing in them is ever waited for, so that they run
to their end without an event loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import psycopg
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from tests.support.orders import Order

R = TypeVar("R")

_NO_SUCH_TABLE = "SELECT * FROM there_is_no_such_table"


def run_blocking(scenario: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that has nothing to wait for."""
    try:
        scenario.send(None)
    except StopIteration as stop:
        result: R = stop.value
        return result
    raise AssertionError("a handle that blocks was awaited")


async def settled(step: Any) -> Any:
    """What a call returns, of a handle that blocks or of one that is awaited."""
    return await step if inspect.isawaitable(step) else step


class BusinessError(Exception):
    """What an application raises."""


class Held:
    """A handle with the verbs of a scenario. An order is a row of the business and a message about it."""

    def __init__(self, raw: Any, outbox: Outbox, *, awaited: bool, two_phase: bool = False) -> None:
        self.raw = raw
        self.outbox = outbox
        self.awaited = awaited
        self.two_phase = two_phase
        self._blocks: list[Any] = []
        self._savepoints: dict[str, Any] = {}
        self._kept: list[object] = []
        #: Does another thing in a child process; the database knows how.
        self.in_a_child: Callable[[str], None]

    # Writing

    async def order(self, customer: str) -> None:
        """Write a row, and send."""
        await self.book(customer)
        await self.send(customer)

    async def book(self, customer: str) -> None:
        """Write a row."""
        raise NotImplementedError

    async def send(self, body: str, **fields: Any) -> UUID:
        """Send a message; its id."""
        send: Callable[..., Any] = self.outbox.asend if self.awaited else self.outbox.send
        id: UUID = await settled(send(self.raw, "orders", body, **fields))
        return id

    async def send_all(self, messages: Sequence[Message]) -> list[UUID]:
        """Send messages; their ids."""
        send_all: Callable[..., Any] = self.outbox.asend_all if self.awaited else self.outbox.send_all
        ids: list[UUID] = await settled(send_all(self.raw, messages))
        return ids

    async def fail(self) -> None:
        """A statement that is an error."""
        with pytest.raises((DBAPIError, psycopg.Error, asyncpg.PostgresError)):
            await self.execute(_NO_SUCH_TABLE)

    async def execute(self, statement: str) -> None:
        """Any statement."""
        await settled(self.raw.execute(text(statement)))

    # How it ends

    async def commit(self) -> None:
        """Commit the transaction."""
        await settled(self.raw.commit())

    async def rollback(self) -> None:
        """Roll the transaction back."""
        await settled(self.raw.rollback())

    async def close(self) -> None:
        """Give the handle up."""
        await settled(self.raw.close())

    # Savepoints

    async def savepoint(self, name: str) -> None:
        """Begin a savepoint."""
        self._savepoints[name] = await settled(self.raw.begin_nested())

    async def release(self, name: str) -> None:
        """End it well."""
        await settled(self._savepoints.pop(name).commit())

    async def roll_back_to(self, name: str) -> None:
        """Undo what came after it."""
        await settled(self._savepoints.pop(name).rollback())

    # Blocks: `with handle.begin()`, and savepoints inside of it

    async def enter(self) -> None:
        """Enter a block: a transaction, or a savepoint in one."""
        block = self._begin_block(nested=bool(self._blocks))
        self._blocks.append(block)
        await settled(block.__aenter__() if self.awaited else block.__enter__())

    async def leave(self, error: Exception | None = None) -> None:
        """Leave the innermost block, by an exception or without."""
        block = self._blocks.pop()
        raised = (type(error) if error else None, error, None)
        await settled(block.__aexit__(*raised) if self.awaited else block.__exit__(*raised))

    async def raises_out(self) -> None:
        """An exception passes through the innermost block."""
        error = BusinessError()
        await self.leave(error)
        raise error

    def _begin_block(self, *, nested: bool) -> Any:
        return self.raw.begin_nested() if nested else self.raw.begin()

    # Two phases

    async def begin_two_phase(self) -> None:
        """Begin a transaction of two phases."""

    async def prepare(self) -> None:
        """End its first phase."""
        raise NotImplementedError

    # What an application listens to

    @property
    def engine(self) -> Engine:
        """The engine below, as its events know it."""
        found: Engine = (self.raw.sync_connection if self.awaited else self.raw).engine
        return found

    def raise_in(self, name: str) -> None:
        """Have a listener of the application raise once, in this event."""
        raised: list[str] = []

        def listener(*_: object) -> None:
            if not raised:
                raised.append(name)
                raise BusinessError(name)

        event.listen(self._target_of(name), name, listener)

    def _target_of(self, name: str) -> object:
        return self.engine

    def break_hints(self) -> None:
        """Have everything of our own raise that is called when a transaction commits."""

        def broken(*_: object) -> None:
            raise BusinessError("hint")

        notifier: Any = self.outbox.notifier
        self._kept.append(notifier.listen(broken))
        notifier.expect = notifier.committed = notifier.hint = broken


class Orm(Held):
    """A session."""

    async def book(self, customer: str) -> None:
        """Write a row, as an object that is flushed."""
        self.add(customer)
        await settled(self.raw.flush())

    def add(self, customer: str) -> None:
        """An object that waits for its flush."""
        self.raw.add(Order(customer=customer))

    async def reset(self) -> None:
        """Make it as new."""
        await settled(self.raw.reset())

    async def expunge_all(self) -> None:
        """Forget its objects."""
        await settled(self.raw.expunge_all())

    async def invalidate(self) -> None:
        """Throw its connections away."""
        await settled(self._current.invalidate())

    async def prepare(self) -> None:
        """End the first phase."""
        if self.awaited:
            await self._current.run_sync(lambda session: session.prepare())
        else:
            self._current.prepare()

    @property
    def session(self) -> Session:
        """The session itself, which blocks, and has the events."""
        found: Session = self._current.sync_session if self.awaited else self._current
        return found

    @property
    def _current(self) -> Any:
        """The session of a scope, which passes only some of its methods on."""
        return self.raw() if hasattr(self.raw, "registry") else self.raw

    @property
    def engine(self) -> Engine:
        """The engine that it is bound to."""
        found: Any = self.session.get_bind()
        return found  # type: ignore[no-any-return]

    def _target_of(self, name: str) -> object:
        return self.engine if name == "commit" else self.session


class Core(Held):
    """A connection of SQLAlchemy's."""

    _two_phases: Any = None

    async def book(self, customer: str) -> None:
        """Write a row."""
        await settled(self.raw.execute(text("INSERT INTO orders (customer) VALUES (:c)"), {"c": customer}))

    async def begin_two_phase(self) -> None:
        """Begin such a transaction, which has an object of its own."""
        self._two_phases = await self._inside(lambda connection: connection.begin_twophase())

    async def prepare(self) -> None:
        """End the first phase."""
        await self._inside(lambda _: self._two_phases.prepare())

    async def commit(self) -> None:
        """Commit what is open."""
        if self._two_phases is None:
            await super().commit()
        else:
            await self._inside(lambda _: self._two_phases.commit())

    async def rollback(self) -> None:
        """Roll back what is open."""
        if self._two_phases is None:
            await super().rollback()
        else:
            await self._inside(lambda _: self._two_phases.rollback())

    async def _inside(self, do: Callable[[Any], Any]) -> Any:
        return await self.raw.run_sync(do) if self.awaited else do(self.raw)


class Driver(Held):
    """psycopg's own connection."""

    async def book(self, customer: str) -> None:
        """Write a row."""
        await settled(self.raw.execute("INSERT INTO orders (customer) VALUES (%s)", (customer,)))

    async def execute(self, statement: str) -> None:
        """Any statement."""
        await settled(self.raw.execute(statement))

    async def savepoint(self, name: str) -> None:
        """Begin a savepoint."""
        await self.execute(f"SAVEPOINT {name}")

    async def release(self, name: str) -> None:
        """End it well."""
        await self.execute(f"RELEASE SAVEPOINT {name}")

    async def roll_back_to(self, name: str) -> None:
        """Undo what came after it."""
        await self.execute(f"ROLLBACK TO SAVEPOINT {name}")

    def _begin_block(self, *, nested: bool) -> Any:
        return self.raw.transaction()

    async def begin_two_phase(self) -> None:
        """Begin a transaction of two phases."""
        await settled(self.raw.tpc_begin(self.raw.xid(1, f"outbox-{id(self.raw)}", "")))

    async def prepare(self) -> None:
        """End the first phase."""
        await settled(self.raw.tpc_prepare())

    async def commit(self) -> None:
        """Commit what is open."""
        await settled(self.raw.tpc_commit() if self.two_phase else self.raw.commit())

    async def rollback(self) -> None:
        """Roll back what is open."""
        await settled(self.raw.tpc_rollback() if self.two_phase else self.raw.rollback())


class Asyncpg(Driver):
    """asyncpg's own connection, in a transaction from its first statement on."""

    def __init__(self, raw: Any, outbox: Outbox, **options: Any) -> None:
        super().__init__(raw, outbox, **options)
        self._transaction: Any = None

    async def book(self, customer: str) -> None:
        """Write a row."""
        await self._begun()
        await self.raw.execute("INSERT INTO orders (customer) VALUES ($1)", customer)

    async def send(self, body: str, **fields: Any) -> UUID:
        """Send a message; its id."""
        await self._begun()
        return await super().send(body, **fields)

    async def _begun(self) -> None:
        if self._transaction is None and not self._blocks:
            self._transaction = self.raw.transaction()
            await self._transaction.start()

    async def execute(self, statement: str) -> None:
        """Any statement."""
        await self._begun()
        await self.raw.execute(statement)

    async def commit(self) -> None:
        """Commit what is open."""
        await self._end("commit")

    async def rollback(self) -> None:
        """Roll back what is open."""
        await self._end("rollback")

    async def _end(self, verb: str) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            await getattr(transaction, verb)()


def play(scenario: Callable[[Any], Awaitable[None]], held: Any, *, awaited: bool) -> None:
    """Run a scenario the way its handle wants."""
    steps: Any = scenario(held)
    if awaited:
        asyncio.run(steps)
    else:
        run_blocking(steps)
