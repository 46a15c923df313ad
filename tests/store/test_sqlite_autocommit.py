"""SQLite's driver has an `autocommit` of its own from Python 3.12 on; what it says is what a transaction is."""

import asyncio
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import outbox as package
from outbox import DatabaseError, NoTransactionError, Outbox
from outbox.schema import metadata
from tests.support.handles import HANDLES
from tests.support.readers import bodies, delivered

LEGACY = -1
DRIVER_LEVEL: Any = vars(sqlite3.Connection)["isolation_level"]


class FromLater(sqlite3.Connection):
    """The driver's connection as Python 3.12 makes it."""

    def __init__(self, database: Any, *, autocommit: Any = LEGACY, **options: Any) -> None:
        super().__init__(database, **options)
        self._level = DRIVER_LEVEL.__get__(self)
        if autocommit != LEGACY:
            DRIVER_LEVEL.__set__(self, None)
        self._autocommit = autocommit
        self._thread = threading.get_ident() if options.get("check_same_thread", True) else None
        self._begin()

    @property
    def autocommit(self) -> Any:
        """Told to its own thread."""
        if self._thread not in (None, threading.get_ident()):
            raise sqlite3.ProgrammingError("SQLite objects created in a thread can only be used in that same thread.")
        return self._autocommit

    @property
    def isolation_level(self) -> Any:
        """What was given, also where it means nothing."""
        return self._level

    @isolation_level.setter
    def isolation_level(self, level: Any) -> None:
        self._level = level
        if self._autocommit == LEGACY:
            DRIVER_LEVEL.__set__(self, level)

    def _begin(self) -> None:
        if self._autocommit is False:
            self.execute("BEGIN")

    def commit(self) -> None:
        """Nothing, if every statement is committed."""
        if self._autocommit is not True:
            super().commit()
            self._begin()

    def rollback(self) -> None:
        """Nothing, if every statement is committed."""
        if self._autocommit is not True:
            super().rollback()
            self._begin()


def arguments(made: str, autocommit: Any) -> dict[str, Any]:
    """What the driver is given."""
    return {"autocommit": autocommit} | ({"factory": FromLater} if made == "stand-in" else {})


#: The interpreter's own where it has the option; the stand-in everywhere.
MADE = ["stand-in"] + (["driver"] if sys.version_info >= (3, 12) else [])


@pytest.fixture(params=MADE)
def made(request: pytest.FixtureRequest) -> str:
    """Whose connections."""
    found: str = request.param
    return found


@pytest.fixture
def path(sqlite_template: Path, tmp_path: Path) -> Path:
    """A migrated file."""
    return Path(shutil.copy(sqlite_template, tmp_path / "shop.sqlite3"))


@pytest.fixture
def make(path: Path, made: str) -> Iterator[Callable[[Any], Engine]]:
    """Makes engines, given the driver's `autocommit`."""
    engines: list[Engine] = []

    def engine(autocommit: Any) -> Engine:
        engines.append(sqlalchemy.create_engine(f"sqlite:///{path}", connect_args=arguments(made, autocommit)))
        return engines[-1]

    yield engine
    for each in engines:
        each.dispose()


@pytest.mark.parametrize("kind", HANDLES)
def test_a_driver_that_commits_every_statement_is_refused(make, kind):
    engine = make(True)
    outbox = Outbox(engine)
    with HANDLES[kind](engine) as handle:
        for _ in range(2):
            with pytest.raises(NoTransactionError, match="autocommit=True the driver commits every statement, too"):
                outbox.send(handle, "orders", "1")
            handle.rollback()

    assert bodies(engine) == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("kind", HANDLES)
@pytest.mark.parametrize("autocommit", [False, LEGACY])
def test_a_driver_that_begins_by_itself_is_in_a_transaction(make, autocommit, kind, end):
    engine = make(autocommit)
    outbox = Outbox(engine)
    with HANDLES[kind](engine) as handle:
        for body in ("1", "2"):
            outbox.send(handle, "orders", body)
            getattr(handle, end)()

    assert bodies(engine) == ([b"1", b"2"] if end == "commit" else [])


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("kind", HANDLES)
def test_what_begin_has_begun_is_a_transaction(make, kind, end):
    """The driver's own commit and rollback do nothing then; the handle's do what they say."""
    engine = make(True)
    outbox = Outbox(engine)
    with HANDLES[kind](engine) as handle:
        for body in ("1", "2"):
            handle.execute(text("BEGIN"))
            outbox.send(handle, "orders", body)
            getattr(handle, end)()

    assert bodies(engine) == ([b"1", b"2"] if end == "commit" else [])
    assert [message.body for message in delivered(outbox.database)] == bodies(engine)


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("autocommit", [True, False, LEGACY])
def test_a_released_savepoint_is_committed_with_its_transaction(make, autocommit, end):
    engine = make(autocommit)
    outbox = Outbox(engine)
    with Session(engine) as session:
        with session.begin_nested():
            outbox.send(session, "orders", "1")
        getattr(session, end)()

    assert bodies(engine) == ([b"1"] if end == "commit" else [])


def test_a_transaction_that_a_statement_has_ended_is_none(make):
    engine = make(False)
    outbox = Outbox(engine)
    with engine.connect() as connection:
        connection.execute(text("COMMIT"))
        with pytest.raises(NoTransactionError):
            outbox.send(connection, "orders", "1")
        # The driver's own rollback wants one to be open.
        connection.execute(text("BEGIN"))
        outbox.send(connection, "orders", "2")
        connection.commit()

    assert bodies(engine) == [b"2"]


# Awaited


async def sent_or_refused(outbox: Outbox, engine: AsyncEngine, end: str) -> str:
    """What becomes of a message in a session."""
    async with AsyncSession(engine) as session:
        try:
            await outbox.asend(session, "orders", "1")
        except NoTransactionError:
            return "refused"
        await getattr(session, end)()
        log = text("SELECT count(*) FROM outbox_message")
        return f"{await session.scalar(log)} written"


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("autocommit", [True, False, LEGACY])
@pytest.mark.parametrize("where", ["in a file", "in memory"])
def test_awaited_it_is_the_same(made, path, where, autocommit, end):
    """The attribute is not passed on by aiosqlite; in memory only its own thread may ask the driver's connection."""
    name = path if where == "in a file" else ""

    async def scenario() -> str:
        engine = create_async_engine(f"sqlite+aiosqlite:///{name}", connect_args=arguments(made, autocommit))
        if where == "in memory":
            async with engine.begin() as connection:
                await connection.run_sync(metadata(dialect="sqlite").create_all)
        found = await sent_or_refused(Outbox(engine), engine, end)
        await engine.dispose()
        return found

    written = "1 written" if end == "commit" else "0 written"
    assert asyncio.run(scenario()) == ("refused" if autocommit is True else written)


# Engines of our own


@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize(
    ("function", "url"), [("create_engine", "sqlite:///x"), ("create_async_engine", "sqlite+aiosqlite:///x")]
)
def test_our_engines_refuse_it(function, url, autocommit):
    with pytest.raises(DatabaseError, match=f"autocommit={autocommit} does not let it do; leave autocommit out of con"):
        getattr(package, function)(url, connect_args={"autocommit": autocommit})


def test_our_engines_take_the_mode_that_they_use(path, made):
    engine = package.create_engine(f"sqlite:///{path}", connect_args=arguments(made, LEGACY))
    with (outbox := Outbox(engine)).begin() as session:
        outbox.send(session, "orders", "1")

    assert bodies(engine) == [b"1"]


def test_a_connection_of_our_engine_that_commits_every_statement_is_refused(path):
    """SQLAlchemy does not commit then, so whatever our engine had begun would be lost without a word."""
    engine = package.create_engine(f"sqlite:///{path}")
    outbox = Outbox(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("CREATE TABLE kept (x)"))
        connection.execute(text("INSERT INTO kept VALUES (1)"))
        with pytest.raises(NoTransactionError, match="AUTOCOMMIT"):
            outbox.send(connection, "orders", "1")
    with engine.connect() as connection:
        kept = connection.execute(text("SELECT count(*) FROM kept")).scalar_one()

    assert (kept, bodies(engine)) == (1, [])
