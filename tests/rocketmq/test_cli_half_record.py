"""`outbox half commit` and `rollback` of transactions that a record in a business database decides."""

import pytest
from sqlalchemy import create_engine as plain_engine
from sqlalchemy.orm import Session

from outbox import Outbox, create_engine, migrate
from outbox.rocketmq import TransactionMQProducer, VerdictStandsError
from outbox.rocketmq.business import Business
from tests.rocketmq.halves import AT_ANY_AGE
from tests.support.command_line import outbox
from tests.support.readers import delivered


@pytest.fixture
def business(tmp_path):
    """A business database without an outbox, where a record can be written."""
    found = create_engine(f"sqlite:///{tmp_path / 'business.db'}")
    migrate.upgrade_record(found)
    yield found
    found.dispose()


@pytest.fixture
def transaction(engine, business):
    """A transaction that its record decides; its business has not begun."""
    producer = TransactionMQProducer("shop", Outbox(engine), business=business, policy=AT_ANY_AGE)
    begun = producer.begin_transaction(verdict="record")
    begun.send("orders", b"1")
    yield begun
    producer.shutdown()


def end(engine, verb, transaction, *options):
    return outbox(engine, "half", verb, transaction.id, *options)


def record(business):
    return "--business", f"sqlite:///{business.url.database}"


def bodies(engine):
    return [message.body for message in delivered(Outbox(engine).database)]


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_without_the_business_database_nothing_is_decided(engine, transaction, verb):
    ended = end(engine, verb, transaction)

    assert (ended.code, "name the database by --business" in ended.err) == (2, True)
    assert [each["transaction_id"] for each in outbox(engine, "half", "list", "--json").json["transactions"]] == [
        transaction.id
    ]


def test_a_commit_is_refused_without_a_record_of_the_commit(engine, business, transaction):
    ended = end(engine, "commit", transaction, *record(business))

    cause = "has no record of a commit in the business database: (1) the business transaction was rolled back"
    assert (ended.code, cause in ended.err, bodies(engine)) == (1, True, [])


def test_a_commit_that_is_recorded_delivers(engine, business, transaction):
    with Session(business) as session:
        transaction.join(session)
        session.commit()

    ended = end(engine, "commit", transaction, *record(business))

    assert (ended.code, bodies(engine)) == (0, [b"1"])


def test_a_rollback_keeps_the_business_from_committing(engine, business, transaction):
    """Else the business would be done, and nobody told of it."""
    ended = end(engine, "rollback", transaction, *record(business))

    with Session(business) as session, pytest.raises(VerdictStandsError):
        transaction.join(session)
    assert (ended.code, bodies(engine)) == (0, [])


def test_a_rollback_of_what_is_recorded_as_committed_is_refused(engine, business, transaction):
    with Session(business) as session:
        transaction.join(session)
        session.commit()

    ended = end(engine, "rollback", transaction, *record(business))

    assert (ended.code, "commit" in ended.err) == (1, True)
    assert [each["transaction_id"] for each in outbox(engine, "half", "list", "--json").json["transactions"]] == [
        transaction.id
    ]


def test_a_rollback_while_the_business_is_under_way_does_nothing(engine, business, transaction, monkeypatch):
    monkeypatch.setattr(Business, "rollback_patience", 0.1)
    with Session(business) as session:
        transaction.join(session)
        ended = end(engine, "rollback", transaction, *record(business))
        session.commit()

    assert (ended.code, "a business transaction is deciding on transaction" in ended.err) == (1, True)
    assert end(engine, "commit", transaction, *record(business)).code == 0


def test_a_database_that_is_gone_can_be_done_without(engine, transaction):
    ended = end(engine, "rollback", transaction, "--unchecked")

    assert (ended.code, outbox(engine, "half", "list", "--json").json["transactions"]) == (0, [])


def test_a_business_database_without_records_is_told(engine, transaction, tmp_path):
    empty = plain_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    empty.connect().close()
    (tmp_path / "empty.db").touch()

    ended = end(engine, "commit", transaction, *record(empty))

    assert (ended.code, "outbox db upgrade --record-only" in ended.err) == (1, True)
