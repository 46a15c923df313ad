"""A business transaction that joined, and a commit that SQLAlchemy is not told of: its messages are delivered, too."""

import logging
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from outbox.errors import DatabaseError, SchemaError
from outbox.rocketmq import TransactionMQProducer, TransactionResolution
from outbox.store.dialects.statements import Sql, Telling
from outbox.store.half_messages.op import Ops
from tests.rocketmq.parts import arrived, check_back, producer_of, verdicts
from tests.support.orders import Base, customers

INSERT = text("INSERT INTO orders (customer) VALUES ('ann')")


@pytest.fixture
def producer(outbox: Outbox, engine: Engine):
    """A producer whose business is beside the outbox."""
    Base.metadata.create_all(engine)
    made = producer_of(outbox)
    yield made
    made.shutdown()


def by_driver(session: Session) -> None:
    """As after a COPY, which only the driver knows."""
    session.connection().connection.driver_connection.commit()  # type: ignore[union-attr]


def by_text(session: Session) -> None:
    session.execute(text("COMMIT"))


HOW = pytest.mark.parametrize("commit", [by_driver, by_text])


def joined(producer: TransactionMQProducer, session: Session, transaction: Any, commit: Any) -> None:
    """A business whose commit nobody is told of."""
    transaction.join(session)
    session.execute(text("INSERT INTO orders (customer) VALUES (:customer)"), {"customer": transaction.id})
    commit(session)


@HOW
def test_leaving_the_block_restores_what_a_commit_that_nobody_saw_has_left(engine, outbox, producer, commit):
    with producer.begin_transaction(verdict="join") as transaction:
        transaction.send("orders", "1")
        transaction.send("orders", "2")
        with Session(engine) as session:
            joined(producer, session, transaction, commit)
    check_back(outbox)

    assert (customers(engine), verdicts(engine)) == ([transaction.id], {transaction.id: "commit"})
    assert (arrived(outbox), arrived(outbox)) == (["1", "2"], [])


@HOW
def test_leaving_the_block_by_an_exception_restores_as_well(engine, outbox, producer, commit):
    """The commit stands, whatever went wrong after it."""
    with pytest.raises(ZeroDivisionError), producer.begin_transaction(verdict="join") as transaction:
        transaction.send("orders", "1")
        with Session(engine) as session:
            joined(producer, session, transaction, commit)
            raise ZeroDivisionError

    assert (arrived(outbox), arrived(outbox)) == (["1"], [])


@HOW
def test_without_a_block_a_commit_by_word_restores(engine, outbox, producer, commit):
    transaction = producer.begin_transaction(verdict="join")
    transaction.send("orders", "1")
    with Session(engine) as session:
        joined(producer, session, transaction, commit)
    transaction.commit()
    transaction.commit()

    assert (arrived(outbox), arrived(outbox)) == (["1"], [])


@HOW
def test_a_commit_that_is_seen_after_one_that_was_not_restores_once(engine, outbox, producer, commit):
    """Before the block is left, or after it."""
    for left_first in (False, True):
        transaction = producer.begin_transaction(verdict="join")
        transaction.send("orders", str(left_first))
        with Session(engine) as session:
            with transaction:
                joined(producer, session, transaction, commit)
                if not left_first:
                    session.execute(text("SELECT 1"))
                    session.commit()
            session.commit()

    assert (arrived(outbox), arrived(outbox)) == (["False", "True"], [])


def test_leaving_the_block_inside_the_business_leaves_the_messages_to_its_commit(engine, outbox, producer):
    with Session(engine) as session:
        transaction = producer.begin_transaction(verdict="join")
        transaction.send("orders", "1")
        with transaction:
            transaction.join(session)
            session.execute(INSERT)
        session.commit()

    assert (customers(engine), arrived(outbox), arrived(outbox)) == (["ann"], ["1"], [])


def test_leaving_the_block_of_a_business_that_was_rolled_back_restores_nothing(engine, outbox, producer):
    with producer.begin_transaction(verdict="join") as transaction:
        transaction.send("orders", "1")
        with Session(engine) as session:
            transaction.join(session)
            session.rollback()

    assert (verdicts(engine), arrived(outbox)) == ({}, [])


@pytest.mark.parametrize("by_exception", [False, True])
def test_what_cannot_be_restored_is_told(engine, outbox, producer, monkeypatch, caplog, by_exception):
    """And another commit by word makes up for it."""
    transaction = producer.begin_transaction(verdict="join")
    transaction.send("orders", "1")

    def fails(*_args: Any) -> bool:
        raise DatabaseError("no connection")

    with Session(engine) as session:
        joined(producer, session, transaction, by_text)
    with monkeypatch.context() as away, caplog.at_level(logging.ERROR, "outbox"):
        away.setattr(producer._broker, "restore", fails)
        with pytest.raises(ZeroDivisionError if by_exception else DatabaseError), transaction:
            if by_exception:
                raise ZeroDivisionError
    told = f"the messages of transaction {transaction.id} were perhaps not restored" in caplog.text
    transaction.commit()

    assert (told, arrived(outbox), arrived(outbox)) == (by_exception, ["1"], [])


def test_a_message_that_another_transaction_has_delivered_is_restored_as_well(engine, outbox, producer):
    """Each of them has its copy."""
    message = Message("orders", "1")
    transaction = producer.begin_transaction(verdict="join")
    transaction.store(message)
    with producer.begin_transaction(verdict="join") as other:
        other.store(message)
        with Session(engine) as session, session.begin():
            other.join(session)
    with transaction, Session(engine) as session:
        joined(producer, session, transaction, by_driver)

    assert arrived(outbox) == ["1", "1"]


def the_process_dies(producer: TransactionMQProducer, engine: Engine, commit: Any, **fields: Any) -> Any:
    """Right after a commit that nobody saw: the block is not left, and nothing else is called."""
    transaction = producer.begin_transaction(verdict="join")
    transaction.send("orders", "1", **fields)
    transaction.send("orders", "2")
    with Session(engine) as session:
        joined(producer, session, transaction, commit)
    return transaction


@HOW
def test_check_back_restores_what_a_process_that_died_has_left(engine, outbox, producer, commit):
    """Once, and whatever immunity was asked for, because the verdict stands."""
    transaction = the_process_dies(producer, engine, commit, headers={"CHECK_IMMUNITY_TIME_IN_SECONDS": "3600"})
    assert arrived(outbox) == []

    check_back(outbox)
    check_back(outbox)

    assert (arrived(outbox), arrived(outbox)) == (["1", "2"], [])
    assert verdicts(engine) == {transaction.id: "commit"}


def test_what_check_back_cannot_restore_it_tries_again(engine, outbox, producer, monkeypatch, caplog):
    transaction = the_process_dies(producer, engine, by_driver)

    def fails(*_args: Any) -> Any:
        raise ValueError("a trigger refuses it")

    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING, "outbox"):
        broken.setattr(Ops, "restore", fails)
        check_back(outbox)
    assert f"transaction {transaction.id}: its messages cannot be restored: " in caplog.text
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_parked SET due_at = parked_at WHERE state = 'retry'"))
    check_back(outbox)

    assert (arrived(outbox), arrived(outbox)) == (["1", "2"], [])


def test_another_process_restores_by_word_what_one_that_died_has_left(engine, outbox, producer):
    transaction = the_process_dies(producer, engine, by_driver)
    with producer_of(outbox) as other:
        for _ in range(2):
            other.end_transaction(transaction.id, TransactionResolution.COMMIT)

    assert (arrived(outbox), arrived(outbox)) == (["1", "2"], [])


@HOW
def test_a_commit_that_is_seen_after_check_back_has_restored_restores_nothing(engine, outbox, producer, commit):
    transaction = producer.begin_transaction(verdict="join")
    transaction.send("orders", "1")
    with transaction, Session(engine) as session:
        joined(producer, session, transaction, commit)
        check_back(outbox)
        session.execute(INSERT)
        session.commit()

    assert (customers(engine), arrived(outbox), arrived(outbox)) == ([transaction.id, "ann"], ["1"], [])


@pytest.mark.parametrize("leave", ["block", "commit", "check"])
def test_a_commit_that_fails_after_one_that_nobody_saw_takes_no_message_with_it(engine, outbox, producer, leave):
    """It had restored them, and the application has caught its error."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE parents (id integer PRIMARY KEY)"))
        connection.execute(
            text("CREATE TABLE children (parent integer REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)")
        )
    transaction = producer.begin_transaction(verdict="join")
    transaction.send("orders", "1")

    def business() -> None:
        with Session(engine) as session:
            joined(producer, session, transaction, by_driver)
            if engine.dialect.name == "sqlite":
                driver: Any = session.connection().connection.driver_connection
                driver.execute("PRAGMA foreign_keys = ON")
                driver.execute("BEGIN IMMEDIATE")
            session.execute(text("INSERT INTO children VALUES (77)"))
            with pytest.raises(IntegrityError):
                session.commit()
            session.rollback()

    if leave == "block":
        with transaction:
            business()
    else:
        business()
        transaction.commit() if leave == "commit" else check_back(outbox)

    assert (customers(engine), arrived(outbox), arrived(outbox)) == ([transaction.id], ["1"], [])


def test_a_restoring_that_fails_when_the_block_is_left_leaves_it_to_check_back(engine, outbox, producer, monkeypatch):
    transaction = producer.begin_transaction(verdict="join")
    transaction.send("orders", "1")
    with Session(engine) as session:
        joined(producer, session, transaction, by_driver)
    with monkeypatch.context() as broken:
        broken.setattr(producer._broker.ops, "_restore", Telling(Sql("SELECT no_column_of_this_name")))
        with pytest.raises(SchemaError, match="no_column_of_this_name"), transaction:
            pass
    check_back(outbox)

    assert (arrived(outbox), arrived(outbox)) == (["1"], [])


def test_a_restoring_that_fails_before_a_commit_after_one_that_nobody_saw_leaves_it_to_others(
    engine, outbox, producer, monkeypatch
):
    """On SQLite no transaction runs then, and each statement is committed by itself."""
    transaction = producer.begin_transaction(verdict="join")
    transaction.send("orders", "1")
    with Session(engine) as session, monkeypatch.context() as broken:
        joined(producer, session, transaction, by_driver)
        broken.setattr(producer._broker.ops, "_restore", Telling(Sql("SELECT no_column_of_this_name")))
        with pytest.raises(Exception, match="no_column_of_this_name"):
            session.commit()
    check_back(outbox)

    assert (arrived(outbox), arrived(outbox)) == (["1"], [])
