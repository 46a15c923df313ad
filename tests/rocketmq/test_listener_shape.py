"""Transactions of the 4.x shape: a listener executes the local transaction, step by step, with every error."""

import logging
import threading
from datetime import timedelta
from types import SimpleNamespace

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import InvalidMessageError, Outbox
from outbox.errors import DatabaseError, MQClientError, SchemaError, VerdictStandsError
from outbox.model.limits import MAX_HEADERS
from outbox.model.message import Message
from outbox.rocketmq import (
    LocalTransactionState,
    MessageQueue,
    SendStatus,
    TransactionMQProducer,
    TransactionResolution,
    TransactionSendResult,
)
from outbox.store.half_messages.half import Halves
from outbox.store.half_messages.op import Decision, Ops
from tests.rocketmq.parts import (
    COMMIT,
    GROUP,
    ROLLBACK,
    UNKNOW,
    Listener,
    arrived,
    check_back,
    halves,
    producer_of,
    verdicts,
)
from tests.support.readers import delivered
from tests.support.sessions import terminate


def sent(outbox, listener, message=None, **options):
    """What came of one message."""
    producer = producer_of(outbox, listener)
    try:
        return producer.send_message_in_transaction(message or Message("orders", "1"), "arg", **options)
    finally:
        producer.shutdown()


def slots_and_places(engine):
    """Of the messages, then of the half messages."""
    statement = text("SELECT slot, id FROM outbox_message WHERE (topic = 'orders') = :real ORDER BY id")
    with engine.connect() as connection:
        return [[tuple(row) for row in connection.execute(statement, {"real": real})] for real in (True, False)]


@pytest.mark.parametrize("key", [None, "order-1"])
def test_a_commit_is_stored_executed_and_delivered(engine, outbox, key):
    listener, message = Listener(COMMIT), Message("orders", b"1", key=key, headers={"a": "b"})

    result = sent(outbox, listener, message)

    ((slot, _),), ((_, place),) = slots_and_places(engine)
    assert result == TransactionSendResult(
        send_status=SendStatus.SEND_OK,
        message_queue=MessageQueue("orders", slot),
        msg_id=str(message.message_id),
        queue_offset=place,
        transaction_id=str(message.message_id),
        local_transaction_state=COMMIT,
    )
    assert [found.message_id for found in delivered(outbox.database)] == [message.message_id]
    assert (len(listener.executed), listener.asked) == (1, [])


def test_the_local_transaction_is_executed_when_the_half_message_is_stored_and_before_its_verdict(engine, outbox):
    """With the message as it was sent, and the argument as it was given."""
    seen = []

    def business(message):
        seen.append((halves(engine), verdicts(engine), arrived(outbox), message.transaction_id, message.message_id))
        return COMMIT

    message, arg = Message("orders", {"a": 1}, key="k", tags="t", headers={"a": "b"}), object()
    listener = Listener(business)
    producer = producer_of(outbox, listener)
    producer.send_message_in_transaction(message, arg)
    producer.shutdown()

    ((found, given),) = listener.executed
    id = message.message_id
    assert seen == [(1, {}, [], str(id), id)]
    assert given is arg
    assert (found.topic, found.key, found.tags, found.body, found.content_type, dict(found.headers)) == (
        "orders",
        "k",
        "t",
        b'{"a":1}',
        "application/json",
        {"a": "b", "__transactionId__": str(id)},
    )


def test_the_message_of_the_caller_stays_as_it_was(outbox):
    """The listener's own changes included."""
    message = Message("orders", "1", headers={"a": "b"}, delay=timedelta(seconds=5))
    id = message.message_id

    def business(found):
        found.body = b"changed"
        found.topic = "changed"
        return COMMIT

    sent(outbox, Listener(business), message)

    kept = (message.headers, message.delay, message.topic, message.body, message.message_id, message.transaction_id)
    assert kept == ({"a": "b"}, timedelta(seconds=5), "orders", b"1", id, None)


@pytest.mark.parametrize(
    ("returned", "recorded"),
    [
        (COMMIT, COMMIT),
        (TransactionResolution.COMMIT, COMMIT),
        (ROLLBACK, ROLLBACK),
        (TransactionResolution.ROLLBACK, ROLLBACK),
        *((strange, UNKNOW) for strange in (UNKNOW, LocalTransactionState.UNKNOWN, None, True, "COMMIT_MESSAGE", 0)),
        (TransactionResolution.UNKNOWN, UNKNOW),
    ],
)
def test_only_a_state_is_a_verdict(engine, outbox, returned, recorded):
    result = sent(outbox, Listener(lambda _: returned))
    stands = {} if recorded is UNKNOW else {result.transaction_id: recorded.value}

    is_state = isinstance(returned, LocalTransactionState | TransactionResolution)
    assert (result.local_transaction_state, type(result.error)) == (recorded, type(None) if is_state else TypeError)
    assert (verdicts(engine), arrived(outbox)) == (stands, ["1"] if recorded is COMMIT else [])


@pytest.mark.parametrize(("answer", "expected"), [(COMMIT, ["1"]), (ROLLBACK, [])])
def test_what_is_unknown_is_decided_by_check_back(outbox, answer, expected):
    sent(outbox, Listener(UNKNOW))
    before = arrived(outbox)
    check_back(outbox, answer)

    assert (before, arrived(outbox)) == ([], expected)


@pytest.mark.parametrize("swallow", [True, False])
def test_what_the_local_transaction_raises_is_unknown_and_raised_again(engine, outbox, caplog, swallow):
    """RocketMQ's way is to say it in the log only."""
    error = RuntimeError("no such customer")
    raised, result = None, None
    with caplog.at_level(logging.WARNING, "outbox"):
        try:
            result = sent(outbox, Listener(error), swallow=swallow)
        except RuntimeError as found:
            raised = found
    check_back(outbox, COMMIT)

    if swallow:
        assert result is not None
        assert (raised, result.local_transaction_state, result.error) == (None, UNKNOW, error)
    else:
        assert raised is error
    assert "raised RuntimeError" in caplog.text
    assert arrived(outbox) == ["1"]


def test_who_is_interrupted_says_nothing(engine, outbox):
    with pytest.raises(KeyboardInterrupt):
        sent(outbox, Listener(KeyboardInterrupt()))

    assert (halves(engine), verdicts(engine), arrived(outbox)) == (1, {}, [])


ONLY_ASKED = (
    "has no execute_local_transaction(message, arg), and is only asked: give the producer a listener that has it"
)


@pytest.mark.parametrize(
    ("listener", "text"),
    [
        (None, "TransactionListener is null"),
        (lambda message: COMMIT, f"the listener (function) {ONLY_ASKED}, or use begin_transaction"),
        (SimpleNamespace(check=print), f"the listener (SimpleNamespace) {ONLY_ASKED}, or use begin_transaction"),
    ],
)
def test_without_somebody_who_executes_nothing_is_sent(engine, outbox, listener, text):
    """There is no listener, or it is one that is only asked."""
    with pytest.raises(MQClientError) as raised:
        sent(outbox, listener)

    assert (str(raised.value), halves(engine)) == (text, 0)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message("orders", b""), "CODE: 13  DESC: the message body length is zero"),
        (Message("t" * 128, b"1"), "The specified topic is longer than topic max length 127."),
        (Message("SELF_TEST_TOPIC", b"1"), "Sending message to topic[SELF_TEST_TOPIC] is forbidden."),
        ("orders", "CODE: 13  DESC: the message is null"),
    ],
)
def test_a_message_that_is_refused_executes_nothing(engine, outbox, message, text):
    listener = Listener(COMMIT)
    with pytest.raises(MQClientError) as raised:
        sent(outbox, listener, message)

    assert (str(raised.value), listener.executed, halves(engine)) == (text, [], 0)


def test_a_limit_of_the_log_is_told_as_such(engine, outbox):
    listener = Listener(COMMIT)
    with pytest.raises(InvalidMessageError, match=f"must be at most {MAX_HEADERS}"):
        sent(outbox, listener, Message("orders", "1", headers={f"h{number}": "x" for number in range(MAX_HEADERS)}))

    assert (listener.executed, halves(engine)) == ([], 0)


def test_what_has_to_be_done_about_the_database_is_told_as_such(tmp_path):
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'empty.sqlite3'}")
    listener = Listener(COMMIT)
    with pytest.raises(SchemaError, match="outbox db upgrade"):
        sent(Outbox(engine), listener)

    assert listener.executed == []


def test_in_a_transaction_of_sqlite_nothing_is_executed_and_the_error_says_why(sqlite_engine):
    outbox, listener = Outbox(sqlite_engine), Listener(COMMIT)
    with Session(sqlite_engine) as session:
        session.execute(text("SELECT 1"))
        with pytest.raises(DatabaseError, match="before the business transaction begins"):
            sent(outbox, listener)

    assert listener.executed == []


def test_a_half_message_that_cannot_be_stored_executes_nothing(engine, outbox, monkeypatch):
    """The cause travels with it."""
    cause = psycopg.OperationalError("disk full")

    def fails(*_args):
        raise cause

    monkeypatch.setattr(Halves, "append", fails)
    listener = Listener(COMMIT)
    with pytest.raises(MQClientError) as raised:
        sent(outbox, listener)

    assert (str(raised.value), raised.value.__cause__) == ("send message Exception: OperationalError: disk full", cause)
    assert (listener.executed, halves(engine)) == ([], 0)


def test_a_half_message_whose_answer_was_lost_is_stored_again_and_is_one(pg_engine, monkeypatch):
    """The server has it, and the connection is gone."""
    outbox, append = Outbox(pg_engine), Halves.append
    lost: list[int | None] = []

    def append_and_lose(self, *args):
        place = yield from append(self, *args)
        if not lost:
            lost.append(place)
            terminate(pg_engine, "query LIKE '%INSERT%'")
            raise psycopg.OperationalError("connection lost")
        return place

    monkeypatch.setattr(Halves, "append", append_and_lose)
    result = sent(outbox, Listener(COMMIT))

    assert (len(lost), halves(pg_engine), result.local_transaction_state) == (1, 2, COMMIT)
    assert (arrived(outbox), arrived(outbox)) == (["1"], [])


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
def test_a_verdict_that_cannot_be_written_is_unknown_with_the_reason(engine, outbox, monkeypatch, caplog, state):
    """And check-back decides; the real client says COMMIT_MESSAGE although the broker never heard of it."""
    cause, end = psycopg.OperationalError("connection lost"), "commit_alone" if state is COMMIT else "roll_back"

    def fails(*_args, **_options):
        raise cause

    written = getattr(Ops, end)
    monkeypatch.setattr(Ops, end, fails)
    with caplog.at_level(logging.WARNING, "outbox"):
        result = sent(outbox, Listener(state))
    monkeypatch.setattr(Ops, end, written)
    before = (result.local_transaction_state, result.error, verdicts(engine))
    check_back(outbox, state)

    state_then, error, stood = before
    reason = f"was perhaps not written: {type(cause).__name__}: connection lost"
    assert (state_then, type(error), error.__cause__, stood) == (UNKNOW, DatabaseError, cause, {})
    assert reason in str(error)
    assert f"check-back decides on transaction {result.transaction_id}" in caplog.text
    assert arrived(outbox) == (["1"] if state is COMMIT else [])


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
def test_a_verdict_whose_answer_was_lost_is_written_once_and_known(pg_engine, monkeypatch, state):
    """The connection went with the answer; the second try meets its own verdict."""
    outbox, end = Outbox(pg_engine), "commit_alone" if state is COMMIT else "roll_back"
    written = getattr(Ops, end)
    lost: list[Decision] = []

    def write_and_lose(self, *args, **options):
        decision = yield from written(self, *args, **options)
        if not lost:
            lost.append(decision)
            terminate(pg_engine, "query LIKE '%INSERT%'")
            raise psycopg.OperationalError("connection lost")
        return decision

    monkeypatch.setattr(Ops, end, write_and_lose)
    result = sent(outbox, Listener(state))

    assert (len(lost), result.local_transaction_state, result.error) == (1, state, None)
    assert (arrived(outbox), arrived(outbox)) == (["1"] if state is COMMIT else [], [])


@pytest.mark.parametrize(("state", "answer", "expected"), [(COMMIT, ROLLBACK, []), (ROLLBACK, COMMIT, ["1"])])
def test_an_end_that_meets_the_opposite_verdict_is_told(engine, outbox, state, answer, expected):
    """Check-back was quicker, and its listener said otherwise."""

    def business(message):
        check_back(outbox, answer)
        return state

    with pytest.raises(VerdictStandsError) as raised:
        sent(outbox, Listener(business))

    assert (raised.value.verdict, arrived(outbox)) == (answer.value, expected)


@pytest.mark.parametrize(("state", "expected"), [(COMMIT, ["1"]), (ROLLBACK, [])])
def test_an_end_that_meets_its_own_verdict_is_a_success(engine, outbox, state, expected):
    def business(message):
        check_back(outbox, state)
        return state

    result = sent(outbox, Listener(business))

    assert (result.local_transaction_state, arrived(outbox), arrived(outbox)) == (state, expected, [])


def test_a_message_that_was_decided_is_not_sent_again(engine, outbox):
    """Its id is that of its transaction, which is over."""
    message = Message("orders", "1")
    sent(outbox, Listener(COMMIT), message)
    again = Listener(COMMIT)
    with pytest.raises(VerdictStandsError, match="was committed before"):
        sent(outbox, again, message)

    assert (again.executed, arrived(outbox), arrived(outbox)) == ([], ["1"], [])


def test_a_message_that_was_not_decided_is_sent_again_and_is_one(engine, outbox):
    message = Message("orders", "1")
    first = sent(outbox, Listener(UNKNOW), message)
    second = sent(outbox, Listener(COMMIT), message)

    assert (first.transaction_id, halves(engine)) == (second.transaction_id, 2)
    assert (arrived(outbox), arrived(outbox)) == (["1"], [])


def test_many_threads_send_at_once(engine, outbox):
    """More than the producer has connections."""
    listener = Listener(lambda message: COMMIT if int(message.body) % 2 else ROLLBACK)
    producer = TransactionMQProducer(GROUP, outbox, listener, half_pool=2)

    def send(first: int) -> None:
        for number in range(first, first + 5):
            producer.send_message_in_transaction(Message("orders", str(number)))

    threads = [threading.Thread(target=send, args=(5 * number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    producer.shutdown()

    assert sorted(map(int, arrived(outbox))) == list(range(1, 30, 2))
    assert len(verdicts(engine)) == 30
