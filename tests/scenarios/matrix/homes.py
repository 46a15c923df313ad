"""The two other axes of the matrix: the databases, and the handles that hold a transaction on them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy
from sqlalchemy import URL, Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool

from outbox import Outbox, create_engine
from tests.scenarios.matrix.held import Asyncpg, Core, Driver, Held, Orm, play
from tests.scenarios.matrix.table import Scenario
from tests.support.handles import (
    ASYNC_HANDLES,
    HANDLES,
    a_psycopg_connection,
    an_async_psycopg_connection,
    an_asyncpg_connection,
)

#: A scenario is for an ordinary handle, or for one of these.
Setting = str

_AWAITED_DRIVERS = {"postgresql+psycopg": "postgresql+psycopg_async", "sqlite": "sqlite+aiosqlite"}
#: Other drivers for the same server, and the ways to hold a transaction that they are played with.
DRIVERS = {"psycopg2": ("Session", "Connection"), "pg8000": ("Session", "Connection")} | {
    "asyncpg": ("AsyncSession", "AsyncConnection", "asyncpg")
}
#: What a driver, or SQLAlchemy with it, does not do by itself.
_NOT_THERE = {
    *(("pg8000", kind, "two_phase") for kind in DRIVERS["pg8000"]),
    *(("asyncpg", kind, "two_phase") for kind in DRIVERS["asyncpg"]),
    ("asyncpg", "asyncpg", "autocommit"),
}


@dataclass(frozen=True, slots=True)
class Home:
    """A database with the tables of an outbox and those of a business."""

    url: URL
    #: Makes engines, as the outbox or as SQLAlchemy itself does.
    make: Callable[..., Engine]
    #: Sees what was committed.
    observer: Engine

    def engine(self, *, awaited: bool = False) -> Any:
        """An engine of one test."""
        if not awaited:
            return self.make(self.url)
        # No pool: connections belong to an event loop, and each test has one of its own.
        name = self.url.drivername
        inner = self.make(self.url.set(drivername=_AWAITED_DRIVERS.get(name, name)), poolclass=NullPool)
        return AsyncEngine(inner)

    def empty(self) -> None:
        """Leave no row of an earlier test."""
        with self.observer.begin() as connection:
            connection.execute(text("DELETE FROM outbox_message"))
            connection.execute(text("DELETE FROM outbox_dedup"))
            connection.execute(text("DELETE FROM orders"))

    def rows(self) -> dict[str, list[str]]:
        """What both tables hold, as somebody else sees it."""
        with self.observer.connect() as connection:
            messages = [bytes(row[0]).decode() for row in connection.execute(text("SELECT body FROM outbox_message"))]
            orders = list(connection.execute(text("SELECT customer FROM orders")).scalars())
        return {"messages": sorted(messages), "orders": sorted(orders)}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of handle."""

    opened: Callable[..., AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
    held: type[Held]
    awaited: bool = False
    on: frozenset[str] = field(default=frozenset(("postgresql", "sqlite", "plain_sqlite")))

    @asynccontextmanager
    async def open(self, home: Home, setting: Setting, make_outbox: Callable[[Any], Outbox]) -> AsyncIterator[Held]:
        """A handle of this kind, and an outbox."""
        engine = home.engine(awaited=self.awaited)
        outbox = make_outbox(engine)
        try:
            async with self._held(engine, outbox, setting) as held:
                held.in_a_child = lambda customer: self._in_a_child(home, engine, outbox, customer)
                yield held
        finally:
            outbox.close()
            if self.awaited:
                await engine.dispose()
            else:
                engine.dispose()

    @asynccontextmanager
    async def _held(self, engine: Any, outbox: Outbox, setting: Setting) -> AsyncIterator[Held]:
        two_phase = setting == "two_phase"
        options: dict[str, Any] = {}
        if setting == "autocommit":
            if issubclass(self.held, Driver):
                options["autocommit"] = True
            else:
                engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        if two_phase and self.held is Orm:
            options["twophase"] = True
        opened: Any = self.opened(engine, **options)
        if self.awaited:
            async with opened as raw:
                yield self.held(raw, outbox, awaited=True, two_phase=two_phase)
        else:
            with opened as raw:
                yield self.held(raw, outbox, awaited=False, two_phase=two_phase)

    def _in_a_child(self, home: Home, engine: Any, outbox: Outbox, customer: str) -> None:
        """Order in a forked process, by the same outbox, on connections of its own."""
        child = os.fork()
        if child == 0:
            try:
                (engine.sync_engine if self.awaited else engine).dispose(close=False)

                async def scenario(_: object) -> None:
                    async with self._held(engine, outbox, "") as held:
                        await held.order(customer)
                        await held.commit()

                play(scenario, None, awaited=self.awaited)
                os._exit(0)
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


_POSTGRESQL = frozenset(("postgresql",))


def databases_of(scenario: Scenario, kind: str) -> Iterator[str]:
    """The names of the homes in which a scenario is played with a kind of handle."""
    yield from sorted(scenario.databases & KINDS[kind].on)
    if "postgresql" in scenario.databases:
        drivers = [driver for driver, kinds in DRIVERS.items() if kind in kinds]
        yield from (each for each in drivers if (each, kind, scenario.setting) not in _NOT_THERE)


KINDS = {
    "Session": Kind(HANDLES["Session"], Orm),
    "scoped_session": Kind(HANDLES["scoped_session"], Orm),
    "Connection": Kind(HANDLES["Connection"], Core),
    "psycopg": Kind(a_psycopg_connection, Driver, on=_POSTGRESQL),
    "AsyncSession": Kind(ASYNC_HANDLES["AsyncSession"], Orm, awaited=True),
    "async_scoped_session": Kind(ASYNC_HANDLES["async_scoped_session"], Orm, awaited=True),
    "AsyncConnection": Kind(ASYNC_HANDLES["AsyncConnection"], Core, awaited=True),
    "psycopg_async": Kind(an_async_psycopg_connection, Driver, awaited=True, on=_POSTGRESQL),
    "asyncpg": Kind(an_asyncpg_connection, Asyncpg, awaited=True, on=frozenset()),
}
MAKES: dict[str, Callable[..., Engine]] = {
    "postgresql": create_engine,
    "sqlite": create_engine,
    "plain_sqlite": sqlalchemy.create_engine,
}
