"""The ways to a verdict: a business transaction that decides, by whichever handle the application holds it."""

import asyncio
import threading
from contextlib import suppress
from datetime import timedelta

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Outbox, create_engine
from outbox.errors import MQClientError, NoTransactionError, TransactionAbortedError
from outbox.model.verdict import DONE
from outbox.rocketmq import TransactionMQProducer, TransactionResolution
from outbox.schema import record_metadata
from tests.rocketmq.parts import (
    COMMIT,
    Listener,
    arrived,
    check_back,
    half_rows,
    halves,
    looked_at,
    parked,
    producer_of,
    verdicts,
)
from tests.support.handles import HANDLES, a_psycopg_connection, awaited
from tests.support.orders import Base, Order, customers

INSERT = text("INSERT INTO orders (customer) VALUES ('ann')")
WAYS = ["join", "record"]


@pytest.fixture
def business(engine, tmp_path, request):
    """A business database of the same kind, with records and without an outbox."""
    if engine.dialect.name == "sqlite":
        made = create_engine(f"sqlite:///{tmp_path / 'business.sqlite3'}")
    else:
        server = request.getfixturevalue("postgres")
        made = create_engine(server.create_database(f"business_{tmp_path.name}"[:60].lower().replace("-", "_")))
    record_metadata().create_all(made)
    Base.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def where(engine, business):
    """In which database the business of a way is."""
    Base.metadata.create_all(engine)
    return {"join": engine, "listener": engine, "record": business}


@pytest.fixture
def producer(outbox, business):
    made = producer_of(outbox, Listener(), business=business)
    yield made
    made.shutdown()


def begun(producer, way, *bodies):
    """A transaction with messages."""
    transaction = producer.begin_transaction(verdict=way)
    for body in bodies or ("1",):
        transaction.send("orders", body)
    return transaction


@pytest.mark.parametrize("handle", HANDLES)
@pytest.mark.parametrize("way", WAYS)
def test_a_business_that_commits_delivers(outbox, producer, business, where, way, handle):
    """On its own; of a record the outbox hears by check-back, or by a word of the producer."""
    transaction = begun(producer, way, "1", "2")
    with HANDLES[handle](where[way]) as held:
        transaction.join(held)
        held.execute(INSERT)
        held.commit()
    at_once = arrived(outbox)
    asked = check_back(outbox, COMMIT, business=business)

    expected = ([], ["1", "2"]) if way == "record" else (["1", "2"], [])
    assert (at_once, arrived(outbox)) == expected
    assert (customers(where[way]), asked, transaction.resolution) == (["ann"], [], TransactionResolution.COMMIT)


@pytest.mark.parametrize("handle", HANDLES)
@pytest.mark.parametrize("way", WAYS)
def test_a_business_that_rolls_back_delivers_nothing(engine, outbox, producer, business, where, way, handle):
    transaction = begun(producer, way)
    with HANDLES[handle](where[way]) as held:
        transaction.join(held)
        held.execute(INSERT)
        held.rollback()
    before = verdicts(engine)
    check_back(outbox, None, business=business)

    assert (before, verdicts(engine)) == ({}, {transaction.id: "rollback"})
    assert (customers(where[way]), arrived(outbox)) == ([], [])


@pytest.mark.parametrize("way", WAYS)
def test_the_context_manager_reads_as_in_the_readme(outbox, producer, business, where, way):
    with producer.begin_transaction(verdict=way) as transaction:
        transaction.send("orders", "1")
        with Session(where[way]) as session, session.begin():
            transaction.join(session)
            session.add(Order(customer="ann"))

    assert (customers(where[way]), arrived(outbox)) == (["ann"], ["1"])


@pytest.mark.parametrize("way", WAYS)
def test_a_business_that_raises_within_the_context_manager_delivers_nothing(outbox, producer, business, where, way):
    with pytest.raises(ZeroDivisionError), producer.begin_transaction(verdict=way) as transaction:
        transaction.send("orders", "1")
        with Session(where[way]) as session, session.begin():
            transaction.join(session)
            session.add(Order(customer="ann"))
            raise ZeroDivisionError
    check_back(outbox, None, business=business)

    assert (customers(where[way]), arrived(outbox)) == ([], [])


@pytest.mark.parametrize("way", WAYS)
def test_a_retried_business_decides_with_the_same_transaction(outbox, producer, business, where, way):
    """As often as it takes, by sessions of its own."""
    transaction = begun(producer, way)
    for attempt in range(3):
        with suppress(ZeroDivisionError), Session(where[way]) as session, session.begin():
            transaction.join(session)
            session.add(Order(customer=str(attempt)))
            if attempt < 2:
                raise ZeroDivisionError
    check_back(outbox, None, business=business)

    assert (customers(where[way]), arrived(outbox)) == (["2"], ["1"])


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("way", WAYS)
def test_every_isolation_will_do(pg_engine, way, level):
    Base.metadata.create_all(pg_engine)
    record_metadata().create_all(pg_engine)
    outbox = Outbox(pg_engine)
    producer = producer_of(outbox, business=pg_engine)
    transaction = begun(producer, way)
    with pg_engine.connect().execution_options(isolation_level=level) as connection:
        transaction.join(connection)
        connection.execute(INSERT)
        connection.commit()
    transaction.commit()
    producer.shutdown()

    assert (customers(pg_engine), arrived(outbox)) == (["ann"], ["1"])


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("commits", [True, False])
def test_a_connection_of_psycopgs_own_decides(pg_engine, commits, says_so):
    """Nobody is told of its commit: `commit(connection)` appends the messages before it, or check-back after it."""
    Base.metadata.create_all(pg_engine)
    outbox = Outbox(pg_engine)
    producer = producer_of(outbox)
    transaction = begun(producer, "join", "1", "2")
    with a_psycopg_connection(pg_engine) as connection:
        transaction.join(connection)
        connection.execute("INSERT INTO orders (customer) VALUES ('ann')")
        if says_so:
            transaction.commit(connection)
        (connection.commit if commits else connection.rollback)()
    at_once = arrived(outbox)
    check_back(outbox)
    producer.shutdown()

    delivered = (["1", "2"], []) if says_so else ([], ["1", "2"])
    assert (customers(pg_engine), at_once, arrived(outbox)) == ((["ann"], *delivered) if commits else ([], [], []))


def test_a_record_is_written_by_no_connection_of_psycopgs_own(pg_engine):
    """Nobody is told of its commit, before which the record is looked for."""
    record_metadata().create_all(pg_engine)
    producer = producer_of(Outbox(pg_engine), business=pg_engine)
    transaction = begun(producer, "record")
    with a_psycopg_connection(pg_engine) as connection, pytest.raises(TypeError, match="Session or a Connection of"):
        transaction.join(connection)
    producer.shutdown()

    assert verdicts(pg_engine) == {}


def test_only_a_psycopg_connection_that_has_joined_is_told_to_commit(pg_engine):
    producer = producer_of(Outbox(pg_engine))
    transaction = begun(producer, "join")
    with Session(pg_engine) as session, pytest.raises(TypeError, match=r"by itself after join\(session\)"):
        transaction.commit(session)
    with (
        a_psycopg_connection(pg_engine) as connection,
        pytest.raises(MQClientError, match=r"call join\(connection\) first"),
    ):
        transaction.commit(connection)
    producer.shutdown()

    assert verdicts(pg_engine) == {}


def test_a_commit_after_the_end_of_the_transaction_takes_no_mark_away(pg_engine):
    """Two statements that are no transaction could be parted: the mark gone, and no message there."""
    outbox = Outbox(pg_engine)
    producer = producer_of(outbox)
    with a_psycopg_connection(pg_engine) as connection:
        connection.autocommit = True
        transaction = begun(producer, "join")
        with connection.transaction():
            transaction.join(connection)
        with pytest.raises(MQClientError, match=r"was not joined by this connection"):
            transaction.commit(connection)
    rows = half_rows(outbox)
    found = looked_at(outbox, rows)
    producer.shutdown()

    assert (found, arrived(outbox)) == ([DONE], ["1"])


def test_a_commit_in_a_transaction_that_has_failed_or_by_another_connection_says_so(pg_engine):
    producer = producer_of(Outbox(pg_engine))
    transaction = begun(producer, "join")
    with a_psycopg_connection(pg_engine) as connection, a_psycopg_connection(pg_engine) as other:
        transaction.join(connection)
        with pytest.raises(MQClientError, match=r"was not joined by this connection"):
            transaction.commit(other)
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
        with pytest.raises(TransactionAbortedError):
            transaction.commit(connection)
    producer.shutdown()

    assert verdicts(pg_engine) == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("commits", [True, False])
def test_two_phases_are_one_transaction(pg_engine, way, commits):
    """Between them check-back waits."""
    Base.metadata.create_all(pg_engine)
    record_metadata().create_all(pg_engine)
    outbox = Outbox(pg_engine)
    producer = producer_of(outbox, business=pg_engine)
    transaction = begun(producer, way)
    rows = half_rows(outbox)
    with pg_engine.connect() as connection:
        both = connection.begin_twophase()
        transaction.join(connection)
        connection.execute(INSERT)
        both.prepare()
        (between,) = looked_at(outbox, rows, business=pg_engine)
        stood = verdicts(pg_engine)
        (both.commit if commits else both.rollback)()
    after = looked_at(outbox, rows, business=pg_engine)
    producer.shutdown()

    assert (between is DONE, stood, after) == (False, {}, [DONE])
    assert (customers(pg_engine), arrived(outbox)) == ((["ann"], ["1"]) if commits else ([], []))


def test_a_session_of_two_phases_commits(pg_engine):
    Base.metadata.create_all(pg_engine)
    outbox = Outbox(pg_engine)
    producer = producer_of(outbox)
    transaction = begun(producer, "join")
    with Session(pg_engine, twophase=True) as session, session.begin():
        transaction.join(session)
        session.add(Order(customer="ann"))
    producer.shutdown()

    assert (customers(pg_engine), arrived(outbox)) == (["ann"], ["1"])


def test_the_ids_of_a_joined_transaction_follow_its_business(engine, outbox, producer, where):
    """The messages take their places before the commit, not at the join: who waited for its locks comes after it."""
    transaction = begun(producer, "join", "joined")
    with Session(engine) as session, session.begin():
        transaction.join(session)
        session.add(Order(customer="ann"))
        outbox.send(session, "orders", "sent meanwhile")

    assert arrived(outbox) == ["sent meanwhile", "joined"]


def test_one_business_transaction_decides_on_many(engine, outbox, producer, where):
    first, second = begun(producer, "join", "1"), begun(producer, "join", "2")
    with Session(engine) as session, session.begin():
        first.join(session)
        session.add(Order(customer="ann"))
        second.join(session)

    assert sorted(arrived(outbox)) == ["1", "2"]
    assert sorted(verdicts(engine).values()) == ["commit"] * 2


def test_messages_may_be_sent_after_the_join(engine, outbox, producer, where):
    """On PostgreSQL; SQLite's one writer is the business."""
    transaction = begun(producer, "join", "1")
    with engine.connect() as connection:
        transaction.join(connection)
        if engine.dialect.name == "postgresql":
            transaction.send("orders", "2")
        connection.execute(INSERT)
        connection.commit()

    assert arrived(outbox) == (["1", "2"] if engine.dialect.name == "postgresql" else ["1"])


def test_the_verdict_of_a_business_transaction_is_asked_of_nobody(engine, outbox, producer, where):
    transaction = begun(producer, "join")

    asked = check_back(outbox, COMMIT)

    assert (asked, verdicts(engine), parked(engine)) == ([], {transaction.id: "rollback"}, [])


def test_a_business_database_that_is_not_known_here_says_nothing(engine, outbox, producer):
    """Whoever knows it decides; nothing is counted meanwhile."""
    transaction = begun(producer, "record")

    check_back(outbox, COMMIT, check_interval=timedelta(milliseconds=1), check_max=1)

    assert (verdicts(engine), parked(engine)) == ({}, [("retry", 0)])
    assert transaction.resolution is TransactionResolution.UNKNOWN


def test_a_business_database_that_is_away_says_nothing(engine, outbox, producer, business):
    """Nor one without the table of records."""
    transaction = begun(producer, "record")
    with business.begin() as connection:
        connection.execute(text("DROP TABLE outbox_record"))

    check_back(outbox, None, business=business, check_interval=timedelta(milliseconds=1), check_max=1)

    assert (verdicts(engine), parked(engine), transaction.resolution) == (
        {},
        [("retry", 0)],
        TransactionResolution.UNKNOWN,
    )


def test_a_transaction_is_joined_only_if_it_was_begun_so(engine, outbox, producer):
    transaction = begun(producer, "listener")
    with engine.connect() as connection, pytest.raises(MQClientError, match='begin with verdict="join"'):
        transaction.join(connection)

    assert verdicts(engine) == {}


@pytest.mark.parametrize("way", WAYS)
def test_a_transaction_without_messages_decides_on_nothing(engine, outbox, producer, where, way):
    transaction = producer.begin_transaction(verdict=way)
    with where[way].connect() as connection, pytest.raises(MQClientError, match="has not been sent yet"):
        transaction.join(connection)

    assert (halves(engine), verdicts(engine)) == (0, {})


@pytest.mark.parametrize("way", WAYS)
def test_a_connection_that_commits_every_statement_cannot_decide(outbox, producer, where, way):
    transaction = begun(producer, way)
    engine = sqlalchemy.create_engine(where[way].url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(NoTransactionError):
        transaction.join(connection)
    engine.dispose()

    assert transaction.resolution is TransactionResolution.UNKNOWN


def test_a_rollback_waits_for_others_that_write_to_the_business_database(engine, outbox, tmp_path):
    """On SQLite any transaction has the whole file."""
    file = create_engine(f"sqlite:///{tmp_path}/business.sqlite3")
    record_metadata().create_all(file)
    other, written = threading.Event(), threading.Event()

    def write() -> None:
        with file.begin():
            other.set()
            written.wait(1)

    writer = threading.Thread(target=write)
    producer = TransactionMQProducer("shop", outbox, business=file)
    transaction = begun(producer, "record")
    writer.start()
    other.wait(60)
    transaction.rollback()
    writer.join(60)

    assert transaction.resolution is TransactionResolution.ROLLBACK


def test_messages_are_rolled_back_after_their_business_transaction(engine, outbox, producer, where):
    """Its connection is closed by then."""
    transaction = begun(producer, "join")
    with suppress(LookupError), Session(engine) as session, session.begin():
        transaction.join(session)
        raise LookupError

    transaction.rollback()

    assert transaction.resolution is TransactionResolution.ROLLBACK


def test_an_async_business_decides_by_run_sync_as_the_error_says(engine, outbox, producer):
    transaction = begun(producer, "join")

    async def business():
        async with AsyncSession(awaited(engine)) as session:
            with pytest.raises(TypeError, match=r"await handle.run_sync\(transaction.join\)"):
                transaction.join(session)
            await session.run_sync(transaction.join)
            before = arrived(outbox) if engine.dialect.name == "postgresql" else []
            await session.commit()
            return before

    before = asyncio.run(business())

    assert (before, arrived(outbox), transaction.resolution) == ([], ["1"], TransactionResolution.COMMIT)
