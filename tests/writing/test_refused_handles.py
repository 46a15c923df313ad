"""What cannot hold a message is refused by an error that says what can, and how to come by it."""

import asyncio
import re
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from outbox import DatabaseError, Message, NoTransactionError, Outbox, TransactionAbortedError
from tests.support.handles import (
    ASYNC_HANDLES,
    HANDLES,
    a_psycopg_connection,
    an_async_psycopg_connection,
    awaited,
    conninfo_of,
)
from tests.support.readers import bodies

BLOCKING = "takes a Session, a scoped_session, a Connection, or a Connection of psycopg or sqlite3, not "
AWAITED = (
    "takes an AsyncSession, an async_scoped_session, an AsyncConnection, a psycopg AsyncConnection or an asyncpg"
    " Connection, not "
)
CALL_IT = "; call it to get a session"
BEGIN = "; begin a transaction: with engine.begin() as connection"
ABEGIN = "; begin a transaction: async with engine.begin() as connection"

#: What is wrong for both worlds, made of an engine, and what is said of it.
WRONG: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "nothing": (lambda _: None, "NoneType"),
    "a text": (lambda _: "session", "str"),
    "an engine": (lambda engine: engine, f"Engine{BEGIN}"),
    "an AsyncEngine": (awaited, f"AsyncEngine{ABEGIN}"),
    "a factory": (sessionmaker, f"sessionmaker{CALL_IT}"),
    "an async factory": (lambda engine: async_sessionmaker(awaited(engine)), f"async_sessionmaker{CALL_IT}"),
    "a class": (lambda _: Session, "the class Session"),
    "an async class": (lambda _: AsyncSession, "the class AsyncSession"),
    "another driver's connection": (
        lambda _: type("Connection", (), {"__module__": "pymysql.connections", "cursor": None})(),
        "pymysql.Connection; of the drivers' own connections only those of psycopg, asyncpg and sqlite3 can be used",
    ),
}


@pytest.mark.parametrize(("make", "said"), WRONG.values(), ids=WRONG)
def test_what_is_no_handle_is_refused(engine, make, said):
    outbox, awaiting, wrong = Outbox(engine), Outbox(awaited(engine)), make(engine)

    for verb, call in (
        ("send", lambda: outbox.send(wrong, "orders", b"")),
        ("send_all", lambda: outbox.send_all(wrong, [Message("orders", b"")])),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(f'{verb} {BLOCKING}{said}')}$"):
            call()
    for verb, acall in (
        ("asend", lambda: awaiting.asend(wrong, "orders", b"")),
        ("asend_all", lambda: awaiting.asend_all(wrong, [Message("orders", b"")])),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(f'{verb} {AWAITED}{said}')}$"):
            asyncio.run(acall())

    assert bodies(engine) == []


def test_a_blocking_handle_is_told_not_to_be_awaited(pg_engine):
    outbox = Outbox(pg_engine)
    with ExitStack() as stack:
        handles = [stack.enter_context(opened(pg_engine)) for opened in (*HANDLES.values(), a_psycopg_connection)]
        for handle in handles:
            with pytest.raises(TypeError, match=rf"^asend {AWAITED}\S+; for this handle call send\(\) without await$"):
                asyncio.run(outbox.asend(handle, "orders", b""))
            with pytest.raises(TypeError, match=r"for this handle call send_all\(\) without await$"):
                asyncio.run(outbox.asend_all(handle, [Message("orders", b"")]))

    assert bodies(pg_engine) == []


def test_an_awaited_handle_is_told_to_be_awaited(pg_engine):
    outbox = Outbox(pg_engine)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            engine = awaited(pg_engine)
            for opened in (*ASYNC_HANDLES.values(), an_async_psycopg_connection):
                handle: Any = await stack.enter_async_context(opened(engine))
                with pytest.raises(TypeError, match=rf"^send {BLOCKING}\S+; for this handle: await asend\(…\)$"):
                    outbox.send(handle, "orders", b"")

    asyncio.run(scenario())
    assert bodies(pg_engine) == []


def test_nothing_of_nothing_needs_a_handle_all_the_same(engine):
    outbox = Outbox(engine)
    wrong: Any = engine
    with pytest.raises(TypeError, match="asend_all takes"):
        asyncio.run(outbox.asend_all(wrong, []))


def test_a_handle_on_another_kind_of_database_is_refused(pg_engine, sqlite_engine):
    here = Outbox(sqlite_engine)
    with (
        Session(pg_engine) as session,
        pytest.raises(DatabaseError, match="on sqlite, this connection is to postgresql; use an Outbox on"),
    ):
        here.send(session, "orders", b"")
    with (
        a_psycopg_connection(pg_engine) as connection,
        pytest.raises(DatabaseError, match="the outbox is on sqlite, where no connection of psycopg leads"),
    ):
        here.send(connection, "orders", b"")

    async def scenario(connect: Any) -> None:
        async with connect as connection:
            with pytest.raises(DatabaseError, match="on sqlite"):
                await here.asend(connection, "orders", b"")

    for connect in (an_async_psycopg_connection(awaited(pg_engine)), AsyncSession(awaited(pg_engine))):
        asyncio.run(scenario(connect))

    assert (bodies(pg_engine), bodies(sqlite_engine)) == ([], [])


def test_a_connection_that_is_closed_is_the_driver_s_error(pg_engine):
    outbox = Outbox(pg_engine)
    with a_psycopg_connection(pg_engine) as connection:
        connection.close()
        with pytest.raises(psycopg.OperationalError, match="closed"):
            outbox.send(connection, "orders", b"")


def test_asyncpg_s_own_connection_needs_a_transaction_and_a_database_of_its_kind(pg_engine, sqlite_engine):
    """Outside of `connection.transaction()` every statement is committed. A connection of a pool is one, too."""
    outbox, elsewhere = Outbox(pg_engine), Outbox(sqlite_engine)

    async def scenario() -> None:
        async with asyncpg.create_pool(conninfo_of(pg_engine.url), min_size=1) as pool, pool.acquire() as connection:
            with pytest.raises(NoTransactionError, match="or begin a transaction"):
                await outbox.asend(connection, "orders", b"")
            with pytest.raises(DatabaseError, match="on sqlite, where no connection of asyncpg leads"):
                await elsewhere.asend(connection, "orders", b"")
            async with connection.transaction():
                await outbox.asend(connection, "orders", b"1")
                await outbox.asend_all(connection, [Message("orders", b"2", key="k"), Message("orders", b"3")])

    asyncio.run(scenario())

    assert bodies(pg_engine) == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    "error", ["a statement of SQLAlchemy's", "a statement of the driver's own", "a cancelled task"]
)
def test_no_error_on_asyncpg_is_overlooked_at_the_commit(pg_engine, error):
    """The server's answer to COMMIT counts, whoever made the transaction fail. A cancelled one ends the connection."""
    engine = create_async_engine(pg_engine.url.set(drivername="postgresql+asyncpg"), poolclass=NullPool)
    outbox = Outbox(engine)

    async def scenario() -> None:
        async with AsyncSession(engine) as session, session.begin():
            await outbox.asend(session, "orders", b"")
            if error == "a cancelled task":
                with pytest.raises(asyncio.CancelledError):
                    task: Any = asyncio.current_task()
                    asyncio.get_running_loop().call_later(0.1, task.cancel)
                    await session.execute(text("SELECT pg_sleep(60)"))
            elif error == "a statement of SQLAlchemy's":
                with pytest.raises(DBAPIError):
                    await session.execute(text("SELECT 1/0"))
            else:
                pooled: Any = await (await session.connection()).get_raw_connection()
                with pytest.raises(asyncpg.DivisionByZeroError):
                    await pooled.driver_connection.fetch("SELECT 1/0")

    with pytest.raises(PendingRollbackError if error == "a cancelled task" else TransactionAbortedError):
        asyncio.run(scenario())

    assert bodies(pg_engine) == []


def test_a_driver_that_nobody_knows_is_refused_with_the_url_that_works():
    """No password is told."""
    engine = sqlalchemy.create_engine("postgresql+psycopg://ann:secret@db1:5433/shop?sslmode=require")
    engine.dialect.driver = "psycopg2cffi"

    with pytest.raises(DatabaseError) as raised:
        Outbox(engine)

    assert str(raised.value) == (
        "the driver psycopg2cffi is not known to tell whether a transaction failed; write the engine's URL as"
        " postgresql+psycopg://db1:5433/shop"
    )
