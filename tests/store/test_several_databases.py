"""A message is written where its rows are, and committed with them, or it is refused."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from outbox import DatabaseError, Inbox, Outbox, create_engine, migrate
from outbox.testing.servers import PostgresServer
from tests.conftest import adopt
from tests.support.handles import (
    ASYNC_HANDLES,
    HANDLES,
    a_psycopg_connection,
    an_async_psycopg_connection,
    awaited,
    conninfo_of,
)
from tests.support.orders import Base, Order, customers
from tests.support.readers import bodies

SEVERAL = "this session's transaction is open on 2 engines, which commit one after the other"
FIX = "send in a session that uses one engine only, or make it with twophase=True"
ELSEWHERE = "this connection is to the database .*, whose relays would never find the message; use an Outbox on"


@pytest.fixture
def other(engine: Engine, postgres: PostgresServer, pg_template: str, tmp_path: Path) -> Iterator[Engine]:
    """A second database of the same kind, with an outbox of its own."""
    if engine.dialect.name == "sqlite":
        found = create_engine(f"sqlite:///{tmp_path / 'other.sqlite3'}")
        migrate.upgrade(found)
    else:
        found = create_engine(postgres.create_database(f"other_{uuid4().hex}", template=pg_template))
        adopt(found)
    Base.metadata.create_all(found)
    yield found
    found.dispose()
    if engine.dialect.name == "postgresql":
        postgres.drop_database(str(found.url.database))


@pytest.fixture
def another(postgres: PostgresServer, pg_template: str) -> Iterator[Engine]:
    """A second PostgreSQL database."""
    name = f"another_{uuid4().hex}"
    engine = create_engine(postgres.create_database(name, template=pg_template))
    yield engine
    engine.dispose()
    postgres.drop_database(name)


@pytest.fixture
def everywhere(shop: Outbox, engine: Engine, other: Engine) -> Callable[[], dict[str, Any]]:
    """What is there in the end."""
    return lambda: {
        "messages": [*bodies(engine), *bodies(other)],
        "orders": [*customers(engine), *customers(other)],
    }


NOTHING: dict[str, Any] = {"messages": [], "orders": []}

# A session over two databases: its orders are in the other one


def row_first(session: Session, outbox: Outbox) -> None:
    session.add(Order(customer="row_first"))
    session.flush()
    outbox.send(session, "orders", "1")


def keyed(session: Session, outbox: Outbox) -> None:
    session.add(Order(customer="keyed"))
    outbox.send(session, "orders", "1", key="order-1")


def row_after(session: Session, outbox: Outbox) -> None:
    outbox.send(session, "orders", "1")
    session.add(Order(customer="row_after"))
    session.flush()


def row_at_the_commit(session: Session, outbox: Outbox) -> None:
    session.add(Order(customer="row_at_the_commit"))
    outbox.send(session, "orders", "1")


def row_in_a_savepoint(session: Session, outbox: Outbox) -> None:
    outbox.send(session, "orders", "1")
    with session.begin_nested():
        session.add(Order(customer="row_in_a_savepoint"))


def message_in_a_savepoint(session: Session, outbox: Outbox) -> None:
    session.add(Order(customer="message_in_a_savepoint"))
    session.flush()
    with session.begin_nested():
        outbox.send(session, "orders", "1")


def handled_first(session: Session, outbox: Outbox) -> None:
    Inbox(outbox, consumer="billing").once(session, uuid4())
    session.add(Order(customer="handled_first"))


def by_the_connection(session: Session, outbox: Outbox) -> None:
    outbox.send(session.connection(), "orders", "1")
    session.add(Order(customer="by_the_connection"))


ORDERS_ELSEWHERE = [
    row_first, keyed, row_after, row_at_the_commit, row_in_a_savepoint, message_in_a_savepoint, handled_first,
    by_the_connection,
]  # fmt: skip


@pytest.mark.parametrize("script", ORDERS_ELSEWHERE, ids=lambda script: script.__name__)
def test_a_session_over_two_databases_is_refused(shop, engine, other, everywhere, script):
    """Before anything is committed in either of them."""
    with (
        pytest.raises(DatabaseError, match=f"^{SEVERAL}.*{FIX}$"),
        Session(engine, binds={Order: other}) as session,
        session.begin(),
    ):
        script(session, shop)

    assert everywhere() == NOTHING


@pytest.mark.parametrize("first", ["the row", "the message"])
def test_awaited_too(async_shop, engine, other, everywhere, first):
    async def scenario() -> None:
        async with AsyncSession(awaited(engine), binds={Order: awaited(other)}) as session:
            session.add(Order(customer="ann"))
            if first == "the row":
                await session.flush()
            await async_shop.asend(session, "orders", "1")
            await session.commit()

    with pytest.raises(DatabaseError, match=SEVERAL):
        asyncio.run(scenario())

    assert everywhere() == NOTHING


def test_a_session_that_was_refused_can_be_used_again(shop, engine, other, everywhere):
    with Session(engine, binds={Order: other}) as session:
        shop.send(session, "orders", "1")
        session.add(Order(customer="ann"))
        with pytest.raises(DatabaseError, match=SEVERAL):
            session.commit()
        session.rollback()
        shop.send(session, "orders", "2")
        session.commit()
        session.add(Order(customer="bob"))
        session.commit()

    assert everywhere() == {"messages": [b"2"], "orders": ["bob"]}


def test_two_phases_are_one_commit(pg_engine, another):
    outbox = Outbox(pg_engine)
    Base.metadata.create_all(another)
    for script in (row_first, row_after, row_at_the_commit):
        with Session(pg_engine, binds={Order: another}, twophase=True) as session, session.begin():
            script(session, outbox)

    assert bodies(pg_engine) == [b"1"] * 3
    assert sorted(customers(another)) == ["row_after", "row_at_the_commit", "row_first"]


def test_a_session_without_messages_may_span_what_it_likes(shop, engine, other, everywhere):
    with Session(engine, binds={Order: other}) as session, session.begin():
        session.execute(text("SELECT 1"))
        session.add(Order(customer="ann"))

    assert everywhere() == {"messages": [], "orders": ["ann"]}


def on_a_connection(connection: Connection) -> Session:
    return Session(connection, join_transaction_mode="create_savepoint")


@pytest.mark.parametrize(
    "make",
    [
        Session,
        lambda engine: Session(engine.execution_options(compiled_cache=None)),
        lambda engine: Session(binds={Order: engine}, bind=engine),
    ],
    ids=["an engine", "other options", "named twice"],
)
def test_savepoints_and_options_are_the_same_database(shop, engine, everywhere, make):
    with make(engine) as session, session.begin():
        row_first(session, shop)
        row_in_a_savepoint(session, shop)
        message_in_a_savepoint(session, shop)

    assert everywhere() == {
        "messages": [b"1"] * 3,
        "orders": ["row_first", "row_in_a_savepoint", "message_in_a_savepoint"],
    }


def test_sessions_on_a_connection_are_in_its_transaction(shop, engine, everywhere):
    with engine.begin() as connection:
        for script in (row_first, row_in_a_savepoint, message_in_a_savepoint):
            with on_a_connection(connection) as session, session.begin():
                script(session, shop)

    assert everywhere() == {
        "messages": [b"1"] * 3,
        "orders": ["row_first", "row_in_a_savepoint", "message_in_a_savepoint"],
    }


def test_engines_with_other_options_are_two_commits_as_well(pg_engine):
    """One database, but a connection for each of them."""
    outbox = Outbox(pg_engine)
    Base.metadata.create_all(pg_engine)
    binds: Any = {Order: pg_engine.execution_options(compiled_cache=None)}
    for write in (row_first, row_after):
        with Session(pg_engine, binds=binds) as session, pytest.raises(DatabaseError, match="open on 2 engines"):
            write(session, outbox)

    assert (bodies(pg_engine), customers(pg_engine)) == ([], [])


# An outbox of one database on a transaction of another


@pytest.mark.parametrize("kind", HANDLES)
def test_a_handle_on_another_database_is_refused(shop, engine, other, everywhere, kind):
    with HANDLES[kind](other) as handle:
        for _ in range(2):
            with pytest.raises(DatabaseError, match=ELSEWHERE):
                shop.send(handle, "orders", "1")
        handle.commit()

    assert everywhere() == NOTHING


@pytest.mark.parametrize("kind", ASYNC_HANDLES)
def test_an_awaited_handle_on_another_database_is_refused(async_shop, engine, other, everywhere, kind):
    async def scenario() -> None:
        async with ASYNC_HANDLES[kind](awaited(other)) as handle:
            with pytest.raises(DatabaseError, match=ELSEWHERE):
                await async_shop.asend(handle, "orders", "1")
            await handle.commit()

    asyncio.run(scenario())
    assert everywhere() == NOTHING


def test_a_driver_s_connection_to_another_database_is_refused(pg_engine, another):
    outbox = Outbox(pg_engine)
    with a_psycopg_connection(another) as connection:
        for _ in range(2):
            with pytest.raises(DatabaseError, match=ELSEWHERE):
                outbox.send(connection, "orders", "1")
        connection.commit()

    async def scenario() -> None:
        async with an_async_psycopg_connection(awaited(another)) as connection:
            with pytest.raises(DatabaseError, match=ELSEWHERE):
                await outbox.asend(connection, "orders", "1")
            await connection.commit()

    asyncio.run(scenario())
    assert (bodies(pg_engine), bodies(another)) == ([], [])


def test_the_refusal_names_both_and_no_password(pg_engine, another):
    url = pg_engine.url.set(password="secret")
    with Session(create_engine(another.url.set(password="secret"))) as session, pytest.raises(DatabaseError) as caught:
        Outbox(create_engine(url)).send(session, "orders", "1")

    said = str(caught.value)
    assert said.startswith(
        f"this connection is to the database {another.url.database}, and the outbox is on {pg_engine.url.database},"
    )
    assert "secret" not in said


# Where it cannot be told


def the_same_file(engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    """Every way to the file of an engine."""
    file = Path(str(engine.url.database))
    link = tmp_path / "link.sqlite3"
    link.symlink_to(file)
    yield sqlalchemy.create_engine(f"sqlite:///{file.parent}/../{file.parent.name}/{file.name}")
    yield sqlalchemy.create_engine(f"sqlite:///{link}")
    yield sqlalchemy.create_engine(f"sqlite:///file:{file}?uri=true")
    yield sqlalchemy.create_engine("sqlite://", creator=lambda: sqlite3.connect(file), poolclass=NullPool)
    yield sqlalchemy.create_engine("sqlite:///elsewhere", creator=lambda: sqlite3.connect(file), poolclass=NullPool)


def the_same_server(engine: Engine, _: Path) -> Iterator[Engine]:
    """Every way to the database of an engine."""
    url, conninfo = engine.url, conninfo_of(engine.url)
    empty, creator = "postgresql+psycopg://", lambda: psycopg.connect(conninfo)
    yield sqlalchemy.create_engine(url.set(host="localhost"))
    yield sqlalchemy.create_engine(url.set(host=None, port=None, query={"host": f"127.0.0.1:{url.port}"}))
    yield sqlalchemy.create_engine(empty, creator=creator)
    yield sqlalchemy.create_engine(url.set(database="elsewhere"), creator=creator)
    yield sqlalchemy.create_engine(empty, connect_args=psycopg.conninfo.conninfo_to_dict(conninfo))


def test_other_ways_to_the_same_database_are_accepted(engine, tmp_path):
    ways = {"sqlite": the_same_file, "postgresql": the_same_server}[engine.dialect.name]
    found = list(ways(engine, tmp_path))
    for way in found:
        for outbox, handle in ((Outbox(engine), way), (Outbox(way), engine)):
            with Session(handle) as session, session.begin():
                outbox.send(session, "orders", "1")
        way.dispose()

    assert bodies(engine) == [b"1"] * 2 * len(found)


def test_a_driver_s_connection_to_the_same_database_is_accepted(pg_engine):
    outboxes = [Outbox(pg_engine), Outbox(pg_engine.execution_options(compiled_cache=None))]
    with closing(psycopg.connect(conninfo_of(pg_engine.url))) as connection:
        for outbox in outboxes * 2:
            outbox.send(connection, "orders", "1")
        connection.commit()

    assert bodies(pg_engine) == [b"1"] * 4


def test_an_engine_that_an_outbox_is_made_with_is_its_own(pg_engine, another):
    """A name of a pooler's, for workers, may stand for the same database."""
    outbox = Outbox(awaited(pg_engine), worker_engine=create_engine(another.url))

    async def scenario() -> None:
        async with outbox.abegin() as session:
            await outbox.asend(session, "orders", "1")

    asyncio.run(scenario())
    outbox.close()
    assert bodies(pg_engine) == [b"1"]
