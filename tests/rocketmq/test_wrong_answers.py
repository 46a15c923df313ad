"""Nobody who lacks what it takes decides: another business database, a process without the listener."""

import logging
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy.orm import Session

from outbox import Message, Outbox, create_engine, migrate
from outbox.model.verdict import Retry
from outbox.rocketmq import LocalTransactionState, MQClientError
from outbox.rocketmq.business import Business
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker import subscription
from tests.rocketmq.parts import (
    CHECK,
    COMMIT,
    ONE_DATABASE,
    Listener,
    arrived,
    end,
    half_rows,
    looked_at,
    producer_of,
    service_of,
    verdicts,
    wait_until_old_enough,
)
from tests.support.command_line import outbox as outbox_command
from tests.support.waiting import eventually

AT_ONCE = timedelta(0)


@pytest.fixture
def businesses(postgres, request):
    """Two business databases of one kind: the right one, and one of another service."""
    names = [f"{request.node.name[:20]}_{which}".replace("[", "_") for which in ("right", "wrong")]
    engines = [create_engine(postgres.create_database(name)) for name in names]
    for each in engines:
        migrate.upgrade_record(each)
    yield engines
    for each, name in zip(engines, names, strict=True):
        each.dispose()
        postgres.drop_database(name)


# The wrong business database


def recorded(outbox, business):
    """A transaction whose business was committed, and which nobody has ended."""
    producer = producer_of(outbox, business=business)
    transaction = producer.begin_transaction()
    transaction.send("orders", b"1")
    with Session(business) as session:
        transaction.join(session)
        session.commit()
    producer.shutdown()
    return transaction


def test_the_absence_of_a_record_in_another_database_is_no_rollback(outbox, businesses, caplog):
    right, wrong = businesses
    transaction = recorded(outbox, right)
    rows = half_rows(outbox)

    (found,) = looked_at(outbox, rows, business=wrong)

    assert isinstance(found, Retry)
    assert (verdicts(outbox.engine), found.counts) == ({}, False)
    assert "its record is in another business database" in found.error
    assert "its record is in another business database" in caplog.text
    looked_at(outbox, rows, business=right)
    assert (verdicts(outbox.engine), arrived(outbox)) == ({transaction.id: "commit"}, ["1"])


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_a_verdict_by_word_wants_the_right_database(outbox, businesses, verb):
    right, wrong = businesses
    transaction = recorded(outbox, right)
    with closing_producer(producer_of(outbox, business=wrong)) as other:
        state = {"commit": COMMIT, "rollback": LocalTransactionState.ROLLBACK_MESSAGE}[verb]
        with pytest.raises(MQClientError, match="its record is in another business database"):
            other.end_transaction(transaction.id, state)

    assert verdicts(outbox.engine) == {}


def closing_producer(producer):
    producer.close = producer.shutdown
    return closing(producer)


@ONE_DATABASE
@pytest.mark.parametrize("command", [["half", "check", "--once"], ["half", "rollback"]])
def test_the_outbox_s_own_database_is_refused(engine, tmp_path, command):
    """Also with a table for records: it is made there by everybody who forgets to name the business database."""
    business = create_engine(f"sqlite:///{tmp_path / 'business.db'}")
    migrate.upgrade_record(business)
    transaction = recorded(Outbox(engine), business)
    migrate.upgrade_record(engine)
    ids = [transaction.id] if "rollback" in command else []

    ended = outbox_command(engine, *command, *ids, "--business", f"sqlite:///{engine.url.database}")

    assert (ended.code, "the business database is the outbox's own" in ended.err) == (2, True)
    assert verdicts(engine) == {}


@ONE_DATABASE
def test_what_makes_the_missing_table_names_its_database(engine, tmp_path):
    business = create_engine(f"sqlite:///{tmp_path / 'business.db'}")
    business.connect().close()

    with pytest.raises(Exception, match=r"--record-only --database sqlite:///.*business\.db") as raised:
        Business(business, connections=1).standing("")
    assert "outbox_record is not there" in str(raised.value)


@ONE_DATABASE
def test_a_producer_with_a_business_database_and_without_a_listener_takes_its_records(outbox, tmp_path):
    business = create_engine(f"sqlite:///{tmp_path / 'business.db'}")

    with closing_producer(producer_of(outbox, business=business)) as producer:
        assert producer.begin_transaction().verdict == "record"


# Without the listener


def test_a_process_without_the_listener_lets_one_that_has_it_go_first(outbox, caplog):
    producer = producer_of(outbox, Listener())
    transaction = producer.begin_transaction()
    transaction.send("orders", b"1")
    producer.shutdown()
    listener = Listener(answer=COMMIT)
    soon = timedelta(milliseconds=50)
    lacking = service_of(outbox, None, check_interval=soon)
    knowing = service_of(outbox, listener.check_local_transaction, check_interval=soon)

    lacking.start()
    assert eventually(lambda: "others are let go first" in caplog.text)
    knowing.start()
    decided = eventually(lambda: verdicts(outbox.engine) == {transaction.id: "commit"})
    for service in (lacking, knowing):
        end(service, 10)

    assert (decided, len(listener.asked)) == (True, 1)


@ONE_DATABASE
def test_a_process_without_the_listener_works_a_while_before_it_lets_others_go_first_again(outbox, caplog):
    """It decides on the other transactions, although one without an answer is always due."""
    producer = producer_of(outbox, Listener())
    producer.begin_transaction().send("orders", b"1")
    producer.shutdown()
    lacking = service_of(outbox, None, check_interval=timedelta(milliseconds=50))

    def moments() -> list[float]:
        return [each.created for each in caplog.records if "others are let go first" in each.getMessage()]

    with caplog.at_level(logging.DEBUG, "outbox"):
        lacking.start()
        repeated = eventually(lambda: len(moments()) >= 2)
        end(lacking)
    first, second = moments()[:2]

    assert repeated
    assert second - first >= 5


@ONE_DATABASE
def test_a_process_that_stands_aside_can_be_stopped_at_once(outbox, caplog, monkeypatch):
    monkeypatch.setattr(subscription, "DEFERRED_SECONDS", 600)
    producer = producer_of(outbox, Listener())
    producer.begin_transaction().send("orders", b"1")
    producer.shutdown()
    lacking = service_of(outbox, None)
    lacking.start()
    assert eventually(lambda: "others are let go first" in caplog.text)

    end(lacking, 60)

    assert not lacking.alive


# A subscription that was dropped


def test_a_check_that_was_dropped_begins_at_the_oldest_that_is_pending(outbox):
    """Else what was sent before would be found by nobody."""
    first = producer_of(outbox, Listener())
    old = first.begin_transaction()
    old.send("orders", b"1")
    first.shutdown()
    with closing(outbox.database.open()) as channel:
        Subscriptions(channel).drop(CHECK)
    second = producer_of(outbox, Listener())
    new = second.begin_transaction()
    new.send("orders", b"2")
    second.shutdown()
    wait_until_old_enough(outbox)

    service_of(outbox, Listener(answer=COMMIT).check_local_transaction).until_empty()

    assert verdicts(outbox.engine) == {old.id: "commit", new.id: "commit"}


# What is no state


@pytest.mark.parametrize("answer", [None, True, "COMMIT_MESSAGE"])
@ONE_DATABASE
def test_a_local_transaction_that_returns_no_state_is_told(outbox, caplog, answer):
    """Most often somebody forgot the return: nothing is delivered before check-back, and nobody would know why."""
    producer = producer_of(outbox, Listener(outcome=lambda _message: answer))

    with caplog.at_level(logging.WARNING, "outbox"):
        result = producer.send_message_in_transaction(Message("orders", b"1"))
    producer.shutdown()

    assert (result.local_transaction_state, type(result.error)) == (LocalTransactionState.UNKNOW, TypeError)
    assert f"it returned {type(answer).__name__} instead of a LocalTransactionState" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"transaction_timeout": 1}, "transaction_timeout is a timedelta, not int"),
        ({"check_interval": AT_ONCE}, "check_interval must be greater than 0"),
        ({"transaction_timeout": timedelta(seconds=-1)}, "transaction_timeout must be greater than 0"),
        ({"check_max": 0}, "check_max must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"business": "sqlite:///shop.db"}, "business is the engine of the business database, not str"),
    ],
)
@ONE_DATABASE
def test_arguments_of_another_kind_are_refused_where_they_are_given(outbox, arguments, text):
    with pytest.raises((TypeError, ValueError), match=text):
        producer_of(outbox, **arguments)
