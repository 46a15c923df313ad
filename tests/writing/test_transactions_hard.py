"""Transactions that fail, that are none, that are prepared, or that are somebody else's."""

import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal, get_args

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import NoTransactionError, Outbox, TransactionAbortedError
from tests.support.handles import HANDLES, conninfo_of
from tests.support.orders import Base, Order
from tests.support.readers import bodies
from tests.support.sessions import terminate
from tests.support.waiting import eventually

JoinMode = Literal["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]


@pytest.fixture
def plain_sqlite_engine(sqlite_template: Path, tmp_path: Path) -> Iterator[Engine]:
    """SQLite as SQLAlchemy opens it by default: the driver begins by itself, and not before a savepoint."""
    path = tmp_path / "plain.sqlite3"
    shutil.copy(sqlite_template, path)
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    yield engine
    engine.dispose()


# Connections that are lost


def test_an_application_recovers_from_a_lost_connection(pg_engine):
    """Rolling back what the server has forgotten already is no error, and the session can be used again."""
    outbox = Outbox(pg_engine)
    with Session(pg_engine) as session:
        outbox.send(session, "orders", "1")
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        terminate(pg_engine, "pid = :pid", pid=pid)
        with pytest.raises(DBAPIError) as caught:
            outbox.send(session, "orders", "2")
        session.rollback()
        outbox.send(session, "orders", "3")
        session.commit()

    assert caught.value.connection_invalidated
    assert bodies(pg_engine) == [b"3"]


def test_a_commit_on_a_lost_connection_is_an_error(pg_engine):
    outbox = Outbox(pg_engine)
    with Session(pg_engine) as session:
        outbox.send(session, "orders", "1")
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        terminate(pg_engine, "pid = :pid", pid=pid)
        with pytest.raises(DBAPIError):
            session.commit()
        session.rollback()

    assert bodies(pg_engine) == []


# Transactions that PostgreSQL has given up


def fail(handle: Any) -> None:
    """A statement that leaves the transaction aborted."""
    with pytest.raises(DBAPIError):
        handle.execute(text("SELECT 1 / 0"))


@pytest.mark.parametrize("kind", HANDLES)
def test_a_commit_that_would_lose_the_message_is_an_error(pg_engine, kind):
    """PostgreSQL answers COMMIT with ROLLBACK there, and no driver tells. The handle is usable afterwards."""
    outbox = Outbox(pg_engine)
    with HANDLES[kind](pg_engine) as handle:
        outbox.send(handle, "orders", "1")
        fail(handle)
        with pytest.raises(TransactionAbortedError, match="roll back, or use a savepoint"):
            handle.commit()
        handle.rollback()
        outbox.send(handle, "orders", "2")
        handle.commit()

    assert bodies(pg_engine) == [b"2"]


def test_a_block_whose_transaction_failed_does_not_pretend_to_commit(pg_engine):
    outbox = Outbox(pg_engine)
    with pytest.raises(TransactionAbortedError), pg_engine.begin() as connection:
        outbox.send(connection, "orders", "1")
        fail(connection)
    with pytest.raises(TransactionAbortedError), Session(pg_engine) as session, session.begin():
        outbox.send(session, "orders", "2")
        fail(session)
    with pytest.raises(TransactionAbortedError), outbox.begin() as session:
        outbox.send(session, "orders", "3")
        fail(session)
    with outbox.begin() as session:
        outbox.send(session, "orders", "4")

    assert bodies(pg_engine) == [b"4"]


def test_a_failed_transaction_takes_no_message(pg_engine):
    outbox = Outbox(pg_engine)
    with Session(pg_engine) as session:
        fail(session)
        with pytest.raises(TransactionAbortedError, match="nothing can be written in it any more; roll back"):
            outbox.send(session, "orders", "1")
        session.rollback()

    assert bodies(pg_engine) == []


def test_a_failed_transaction_without_messages_is_none_of_our_business(pg_engine):
    Outbox(pg_engine)
    with Session(pg_engine) as session:
        fail(session)
        session.commit()


def test_a_failed_statement_ends_nothing_on_sqlite(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    with Session(sqlite_engine) as session:
        outbox.send(session, "orders", "1")
        with pytest.raises(DBAPIError):
            session.execute(text("SELECT * FROM there_is_no_such_table"))
        session.commit()

    assert bodies(sqlite_engine) == [b"1"]


# Autocommit


@pytest.mark.parametrize("kind", HANDLES)
@pytest.mark.parametrize("database", ["pg_engine", "plain_sqlite_engine"])
def test_an_engine_in_autocommit_is_refused(request, database, kind):
    engine = request.getfixturevalue(database)
    outbox = Outbox(engine)
    committing = engine.execution_options(isolation_level="AUTOCOMMIT")
    with HANDLES[kind](committing) as handle, pytest.raises(NoTransactionError, match="AUTOCOMMIT"):
        outbox.send(handle, "orders", "1")

    assert bodies(engine) == []


@pytest.mark.parametrize("database", ["pg_engine", "plain_sqlite_engine"])
def test_a_connection_in_autocommit_is_refused(request, database):
    engine = request.getfixturevalue(database)
    outbox = Outbox(engine)
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(NoTransactionError):
            outbox.send(connection, "orders", "1")
    with engine.begin() as connection:
        outbox.send(connection, "orders", "2")

    assert bodies(engine) == [b"2"]


def test_the_transaction_of_our_own_sqlite_engine_cannot_be_switched_off(sqlite_engine):
    """It begins by itself, whatever the isolation level says."""
    outbox = Outbox(sqlite_engine)
    with Session(sqlite_engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        with suppress(NoTransactionError):
            outbox.send(session, "orders", "1")
        session.rollback()

    assert bodies(sqlite_engine) == []


def test_a_transaction_of_the_driver_within_autocommit_is_a_transaction(pg_engine):
    """What counts is the server's state, not the flag."""
    outbox = Outbox(pg_engine)
    with pg_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        driver: Any = connection.connection.driver_connection
        with driver.transaction():
            outbox.send(connection, "orders", "1")
        with suppress(RuntimeError), driver.transaction():
            outbox.send(connection, "orders", "2")
            raise RuntimeError

    assert bodies(pg_engine) == [b"1"]


# Two phases


def test_a_transaction_in_two_phases_is_one(pg_engine):
    outbox = Outbox(pg_engine)
    with Session(pg_engine, twophase=True) as session:
        outbox.send(session, "orders", "1")
        session.prepare()
        assert bodies(pg_engine) == []
        session.commit()
        outbox.send(session, "orders", "2")
        session.prepare()
        session.rollback()
        outbox.send(session, "orders", "3")
        session.commit()
    with pg_engine.connect() as connection, connection.begin_twophase() as transaction:
        outbox.send(connection, "orders", "4")
        transaction.prepare()
        transaction.commit()

    assert bodies(pg_engine) == [b"1", b"3", b"4"]


def test_a_failed_transaction_cannot_be_prepared(pg_engine):
    outbox = Outbox(pg_engine)
    with Session(pg_engine, twophase=True) as session:
        outbox.send(session, "orders", "1")
        fail(session)
        with pytest.raises(TransactionAbortedError):
            session.commit()
        session.rollback()
    with pg_engine.connect() as connection:
        transaction = connection.begin_twophase()
        outbox.send(connection, "orders", "2")
        fail(connection)
        with pytest.raises(TransactionAbortedError):
            transaction.commit()
        connection.rollback()
        outbox.send(connection, "orders", "3")
        connection.commit()

    assert bodies(pg_engine) == [b"3"]


# A Session inside somebody else's transaction: the shape of every test that rolls back at its end


def wake_ups(outbox: Outbox) -> tuple[list[None], object]:
    """A list that grows with every hint, and what keeps it growing."""
    woken: list[None] = []
    return woken, outbox.notifier.listen(lambda: woken.append(None))


@pytest.mark.parametrize("mode", get_args(JoinMode))
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("savepoint", [False, True])
def test_a_session_in_a_foreign_transaction_hints_at_the_real_commit_only(engine, mode: JoinMode, end, savepoint):
    outbox = Outbox(engine)
    woken, _listener = wake_ups(outbox)
    with engine.connect() as connection:
        outer = connection.begin()
        if savepoint:
            connection.begin_nested()
        with Session(connection, join_transaction_mode=mode) as session:
            outbox.send(session, "orders", "1")
            session.commit()
        really_committed = mode == "control_fully" and not savepoint
        if not really_committed:
            assert not eventually(lambda: bool(woken), 0.1)
            getattr(outer, end)()

    expected = [b"1"] if really_committed or end == "commit" else []
    assert bodies(engine) == expected
    assert eventually(lambda: bool(woken), 5.0 if expected else 0.1) == bool(expected)


def test_a_session_whose_outer_transaction_is_rolled_back_leaves_nothing(engine):
    """The usual fixture of an application's tests: everything commits, and nothing stays."""
    outbox = Outbox(engine)
    with engine.connect() as connection:
        outer = connection.begin()
        for body in ("1", "2"):
            with Session(connection, join_transaction_mode="create_savepoint") as session, session.begin():
                outbox.send(session, "orders", body, key="k")
        seen = connection.execute(text("SELECT count(*) FROM outbox_message")).scalar()
        outer.rollback()

    assert (seen, bodies(engine)) == (2, [])


def test_engines_with_other_options_share_one_listener_to_their_pool(engine):
    outbox = Outbox(engine)
    before = len(list(engine.pool.dispatch.checkin))
    kept = [engine.execution_options(compiled_cache=None) for _ in range(20)]

    for derived in kept:
        with derived.begin() as connection:
            outbox.send(connection, "orders", "1")

    assert len(list(engine.pool.dispatch.checkin)) == before
    assert bodies(engine) == [b"1"] * 20


def test_a_keyed_send_within_a_flush_does_not_flush(engine):
    """As a query would not: a hook of the application that sends for each new row, say."""
    Base.metadata.create_all(engine)
    outbox = Outbox(engine)
    with Session(engine) as session:

        @event.listens_for(session, "after_flush")
        def announce(session, context):
            for each in session.new:
                outbox.send(session, "orders", each.customer, key="k")

        session.add(Order(customer="ann"))
        session.commit()

    assert bodies(engine) == [b"ann"]


@pytest.mark.parametrize("level", ["SERIALIZABLE", "REPEATABLE READ"])
def test_the_engines_isolation_level_is_not_that_of_our_own_connections(pg_engine, level):
    engine = sqlalchemy.create_engine(pg_engine.url, isolation_level=level)

    with closing(Outbox(engine).database.open()) as channel, channel.transaction():
        found = channel.rows("SELECT current_setting('transaction_isolation')")

    assert found == [("read committed",)]


@pytest.mark.parametrize("factory", [psycopg.RawCursor, psycopg.ClientCursor, psycopg.ServerCursor])
def test_the_kind_of_cursors_of_a_driver_s_connection_does_not_matter(pg_engine, factory):
    with psycopg.connect(conninfo_of(pg_engine.url), row_factory=dict_row) as connection:
        connection.cursor_factory = factory
        ids = [Outbox(pg_engine).send(connection, "orders", "1", dedup_key="d") for _ in range(2)]

    assert ids[0] == ids[1]
    assert bodies(pg_engine) == [b"1"]


def test_a_thousand_outboxes_on_one_engine_cost_a_commit_nothing(pg_engine):
    """One for each tenant, say: an engine is prepared once, and a transaction tells only those that took part."""
    outbox = Outbox(pg_engine)
    commit = pg_engine.dialect.do_commit
    others = [Outbox(pg_engine, schema=f"tenant_{number % 10}") for number in range(1_000)]

    with outbox.begin() as session:
        outbox.send(session, "orders", "1")

    assert (bodies(pg_engine), len(others)) == ([b"1"], 1_000)
    assert pg_engine.dialect.do_commit is commit


def test_two_outboxes_in_one_transaction_are_both_told(pg_engine):
    one, other = Outbox(pg_engine), Outbox(pg_engine)
    told: list[str] = []
    listeners = [one.notifier.listen(lambda: told.append("one")), other.notifier.listen(lambda: told.append("other"))]

    with Session(pg_engine) as session, session.begin():
        one.send(session, "orders", "1")
        other.send(session, "orders", "2")
        assert told == []

    assert sorted(told) == ["one", "other"]
    del listeners


def test_an_outbox_may_be_made_while_others_connect_with_its_engine(engine):
    """As an application does that makes one for each request."""
    Outbox(engine)
    event.listen(engine, "connect", lambda *_: Outbox(engine))
    engine.dispose()

    with engine.connect() as connection:
        assert connection.execute(text("SELECT 1")).scalar_one() == 1
