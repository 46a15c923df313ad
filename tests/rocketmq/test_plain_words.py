"""A database that does not answer: its errors are ours, and say what to do."""

import logging
import threading

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, create_engine, migrate
from outbox.errors import DatabaseError, MQClientError, OutboxError, VerdictStandsError
from outbox.rocketmq import TransactionMQProducer
from outbox.schema import record_metadata
from outbox.testing.servers import PostgresServer
from tests.conftest import started
from tests.rocketmq.parts import COMMIT, ROLLBACK, UNKNOW, Listener, arrived, check_back, producer_of, verdicts
from tests.support.handles import a_psycopg_connection
from tests.support.orders import Base, customers
from tests.support.sessions import terminate

INSERT = text("INSERT INTO orders (customer) VALUES ('ann')")


def begun(producer: TransactionMQProducer, way="join"):
    """A transaction with a message."""
    transaction = producer.begin_transaction(verdict=way)
    transaction.send("orders", "1")
    return transaction


@pytest.fixture
def impatient(monkeypatch):
    """Nobody waits for a lock for long."""
    dialect = "outbox.store.dialects.postgresql.channel._SETTINGS"
    monkeypatch.setattr(dialect, "SET lock_timeout = '300ms'; SET enable_seqscan = off; SET jit = off")
    monkeypatch.setattr("outbox.store.dialects.sqlite.channel.BUSY_SECONDS", 0.3)


def test_a_rollback_beside_a_business_that_does_not_end_says_so(engine, outbox, impatient):
    producer = producer_of(outbox)
    transaction = begun(producer)
    raised: list[Exception] = []

    def roll_back() -> None:
        try:
            producer.end_transaction(transaction.id, ROLLBACK)
        except Exception as error:
            raised.append(error)

    with engine.connect() as business:
        transaction.join(business)
        thread = threading.Thread(target=roll_back)
        thread.start()
        thread.join()
        business.commit()
    producer.shutdown()

    (error,) = raised
    assert (type(error), arrived(outbox)) == (DatabaseError, ["1"])
    assert str(error) == (
        f"the rollback of transaction {transaction.id} was perhaps not written: another transaction is deciding,"
        " or keeps the database busy, and has not ended; try again"
    )


def test_a_send_beside_a_business_that_does_not_end_says_so(engine, outbox, impatient):
    Base.metadata.create_all(engine)
    producer = producer_of(outbox)
    transaction = begun(producer, "join")
    raised: list[Exception] = []

    def send() -> None:
        try:
            producer._begin("join", id=transaction.id).send("orders", "2")
        except Exception as error:
            raised.append(error)

    on_postgresql = engine.dialect.name == "postgresql"
    with a_psycopg_connection(engine) if on_postgresql else engine.connect() as business:
        transaction.join(business)
        if on_postgresql:
            # On SQLite the business has the whole file since its begin.
            transaction.commit(business)
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        business.commit()
    producer.shutdown()

    (error,) = raised
    assert (type(error), arrived(outbox)) == (MQClientError, ["1"])
    assert str(error).startswith("send message Exception: another transaction is deciding")


@pytest.mark.storm
def test_every_call_of_a_producer_whose_database_is_away_raises_an_error_of_ours():
    with started(PostgresServer) as server:
        engine, business = (create_engine(server.create_database(name)) for name in ("shop", "business"))
        migrate.upgrade(engine)
        migrate.upgrade_record(business)
        outbox = Outbox(engine)
        producer = producer_of(outbox, Listener(COMMIT), business=business)
        transaction, recorded = begun(producer, "listener"), begun(producer, "record")
        server.stop()
        calls = {
            "send": lambda: transaction.send("orders", "2"),
            "producer.send": lambda: producer.send(Message("orders", "2"), transaction),
            "send, record": lambda: recorded.send("orders", "2"),
            "first send": lambda: begun(producer, "record"),
            "commit": transaction.commit,
            "rollback": transaction.rollback,
            "commit, record": recorded.commit,
            "rollback, record": recorded.rollback,
            "resolution": lambda: transaction.resolution,
            "end": lambda: producer.end_transaction(transaction.id, COMMIT),
            "look": lambda: producer.end_transaction(transaction.id, UNKNOW),
            "4.x": lambda: producer.send_message_in_transaction(Message("orders", "3")),
        }
        raised = {}
        for name, call in calls.items():
            try:
                call()
            except Exception as error:
                raised[name] = error
        outbox.close()

    assert raised.keys() == calls.keys()
    assert [name for name, error in raised.items() if not isinstance(error, OutboxError)] == []
    assert {type(error.__cause__) for error in raised.values()} == {psycopg.OperationalError}


@pytest.fixture
def business(postgres, request):
    """A business database on PostgreSQL."""
    name = f"business_{request.node.name[:30]}".replace("[", "_").replace("]", "").replace("-", "_")
    made = create_engine(postgres.create_database(name))
    record_metadata().create_all(made)
    Base.metadata.create_all(made)
    yield made
    made.dispose()
    postgres.drop_database(name)


def restarted(engine: Engine) -> None:
    """Lose every connection, as by a restart."""
    terminate(engine, "true")
    engine.dispose()


def test_a_restart_of_the_business_database_is_not_noticed(outbox, business):
    """By a commit, by a rollback, and by a word from another process."""
    producer = producer_of(outbox, business=business)
    for number in range(3):
        transaction = begun(producer, "record")
        with Session(business) as session, session.begin():
            transaction.join(session)
        restarted(business)
        if number:
            producer.end_transaction(transaction.id, COMMIT)
        else:
            transaction.commit()
    restarted(business)
    begun(producer, "record").rollback()
    producer.shutdown()

    assert arrived(outbox) == ["1", "1", "1"]


@pytest.mark.parametrize("away", ["outbox", "business"])
def test_leaving_the_block_of_a_committed_business_raises_nothing(outbox, business, monkeypatch, caplog, away):
    """Its record is there, and check-back finds it."""
    producer = producer_of(outbox, business=business)

    def fails(*_args, **_options):
        raise psycopg.OperationalError("connection refused")

    with (
        monkeypatch.context() as meanwhile,
        caplog.at_level(logging.WARNING, "outbox"),
        producer.begin_transaction(verdict="record") as transaction,
    ):
        transaction.send("orders", "1")
        with Session(business) as session, session.begin():
            transaction.join(session)
            session.execute(INSERT)
        meanwhile.setattr(*((producer._broker, "end") if away == "outbox" else (producer._business, "standing")), fails)
    before = arrived(outbox)
    check_back(outbox, business=business)
    producer.shutdown()

    assert (customers(business), before, arrived(outbox)) == (["ann"], [], ["1"])
    assert "connection refused; check-back finds the record" in caplog.text


def test_leaving_the_block_of_a_business_that_was_fenced_tells_so(outbox, business):
    producer = producer_of(outbox, business=business)
    with pytest.raises(VerdictStandsError), producer.begin_transaction(verdict="record") as transaction:
        transaction.send("orders", "1")
        with Session(business) as session:
            transaction.join(session)
            session.rollback()
        check_back(outbox, business=business)
    producer.shutdown()

    assert verdicts(outbox.engine) == {transaction.id: "rollback"}
