"""What is sent on handles that are awaited, or that are none of SQLAlchemy's, is captured as well."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)

from outbox import Message, Outbox
from outbox.testing.capture import Capture


@pytest.fixture
def capture() -> Iterator[Capture]:
    with Capture() as capture:
        yield capture


def texts(messages: list[Message]) -> list[str]:
    return [message.body.decode() for message in messages]


def conninfo(engine: Engine) -> str:
    return engine.url.set(drivername="postgresql").render_as_string(hide_password=False)


# psycopg's own connections


def test_a_psycopg_connection_is_asked_what_became_of_its_transaction(pg_engine, capture):
    """Open or decided, with savepoints or without; a look does not disturb it."""
    outbox = Outbox(pg_engine)
    with psycopg.connect(conninfo(pg_engine)) as connection:
        outbox.send(connection, "orders", "1")
        with suppress(ZeroDivisionError), connection.transaction():
            outbox.send(connection, "orders", "gone")
            raise ZeroDivisionError
        with connection.transaction():
            outbox.send(connection, "orders", "2")
        looks = [(texts(capture.messages), texts(capture.committed))]
        connection.commit()
        looks.append((texts(capture.messages), texts(capture.committed)))
        outbox.send(connection, "orders", "gone")
        connection.rollback()
        outbox.send(connection, "orders", "3")

    assert looks == [(["1", "2"], []), (["1", "2"], ["1", "2"])]
    assert texts(capture.messages) == texts(capture.committed) == ["1", "2", "3"]
    assert texts(capture.rolled_back) == ["gone", "gone"]


def test_what_a_psycopg_connection_took_with_it_is_gone(pg_engine, capture):
    """Closed without a commit, or failed and then rolled back."""
    outbox = Outbox(pg_engine)
    connection = psycopg.connect(conninfo(pg_engine))
    outbox.send(connection, "orders", "gone")
    connection.close()
    with psycopg.connect(conninfo(pg_engine)) as failed:
        outbox.send(failed, "orders", "gone")
        with suppress(psycopg.Error):
            failed.execute("SELECT * FROM there_is_no_such_table")
        undecided = texts(capture.messages)
        failed.rollback()

    assert undecided == ["gone"]
    assert texts(capture.messages) == []


# Handles that are awaited


@asynccontextmanager
async def an_async_session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as session:
        yield session


@asynccontextmanager
async def an_async_scoped_session(engine: AsyncEngine) -> AsyncIterator[async_scoped_session[AsyncSession]]:
    scope = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
    yield scope
    await scope.remove()


@asynccontextmanager
async def an_async_connection(engine: AsyncEngine) -> AsyncIterator[Any]:
    async with engine.connect() as connection:
        yield connection


HANDLES: dict[str, Callable[[AsyncEngine], Any]] = {
    "AsyncSession": an_async_session,
    "async_scoped_session": an_async_scoped_session,
    "AsyncConnection": an_async_connection,
}


def in_an_event_loop(engine: Engine, act: Callable[[AsyncEngine], Any]) -> None:
    """Run `act` with an AsyncEngine on the same database."""

    async def run() -> None:
        lite = engine.dialect.name == "sqlite"
        url = engine.url.set(drivername="sqlite+aiosqlite") if lite else engine.url
        twin = create_async_engine(url)
        try:
            await act(twin)
        finally:
            await twin.dispose()

    asyncio.run(run())


@pytest.mark.parametrize("kind", HANDLES)
def test_what_is_sent_on_an_awaited_handle_is_captured(engine, capture, kind):
    async def act(twin: AsyncEngine) -> None:
        outbox = Outbox(twin)
        async with HANDLES[kind](twin) as handle:
            await outbox.asend(handle, "orders", "gone")
            await handle.rollback()
            await outbox.asend(handle, "orders", "1")
            with suppress(ZeroDivisionError):
                async with handle.begin_nested():
                    await outbox.asend(handle, "orders", "gone")
                    raise ZeroDivisionError
            async with handle.begin_nested(), handle.begin_nested():
                await outbox.asend_all(handle, [Message("orders", "2"), Message("orders", "3")])
            undecided = texts(capture.messages), texts(capture.committed)
            await handle.commit()
            await outbox.asend(handle, "orders", "gone")
        assert undecided == (["1", "2", "3"], [])

    in_an_event_loop(engine, act)

    assert texts(capture.messages) == texts(capture.committed) == ["1", "2", "3"]


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"])
def test_what_a_rolled_back_test_committed_counts_when_awaited(engine, capture, mode):
    async def act(twin: AsyncEngine) -> None:
        outbox = Outbox(twin)
        async with twin.connect() as connection:
            outer = await connection.begin()
            async with AsyncSession(connection, join_transaction_mode=mode) as session:
                await outbox.asend(session, "orders", "1")
                await session.commit()
            async with AsyncSession(connection, join_transaction_mode=mode) as session:
                await outbox.asend(session, "orders", "gone")
                await session.rollback()
            if outer.is_active:
                await outer.rollback()

    in_an_event_loop(engine, act)

    assert texts(capture.messages) == ["1"]


def test_a_psycopg_connection_that_is_awaited_is_asked_when_it_is_over(pg_engine, capture):
    outbox = Outbox(pg_engine)

    async def act() -> None:
        async with await psycopg.AsyncConnection.connect(conninfo(pg_engine)) as connection:
            await outbox.asend(connection, "orders", "1")
            assert texts(capture.messages) == ["1"]
            await connection.commit()
            await outbox.asend(connection, "orders", "gone")
            await connection.rollback()

    asyncio.run(act())

    assert texts(capture.messages) == texts(capture.committed) == ["1"]
