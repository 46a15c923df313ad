"""Where the real RocketMQ loses, repeats or contradicts, as observed on 5.5.0: the same stories, with the right end."""

from datetime import timedelta

import pytest

from outbox.errors import VerdictStandsError
from outbox.model.message import Message
from outbox.rocketmq import TransactionResolution
from tests.rocketmq.parts import (
    AT_ONCE,
    COMMIT,
    HOUR,
    ONE_DATABASE,
    ROLLBACK,
    UNKNOW,
    Listener,
    arrived,
    check_back,
    parked,
    producer_of,
    verdicts,
)
from tests.support.leases import step_clock
from tests.support.readers import delivered
from tests.support.waiting import eventually


@pytest.fixture
def producer(outbox):
    made = producer_of(outbox, Listener(), check_interval=timedelta(milliseconds=20))
    yield made
    made.shutdown()


def one(producer, body="1", **fields):
    """A transaction with a message."""
    transaction = producer.begin_transaction()
    transaction.send("orders", body, **fields)
    return transaction


def test_a_commit_after_the_check_committed_delivers_once(outbox, producer):
    """There: two deliveries."""
    transaction = one(producer)
    check_back(outbox, COMMIT)
    transaction.commit()

    assert (arrived(outbox), check_back(outbox, COMMIT), arrived(outbox)) == (["1"], [], [])


def test_checks_stop_with_the_end(engine, outbox, producer):
    """There: a commit after an UNKNOWN check delivers, and the checks go on."""
    transaction = one(producer)
    before = check_back(outbox, UNKNOW, check_interval=AT_ONCE, check_max=3)
    other = one(producer, "2")
    check_back(outbox, UNKNOW)
    other.commit()
    step_clock(engine, 2 * HOUR, "outbox_parked.due_at")
    after = check_back(outbox, ROLLBACK, check_interval=AT_ONCE)

    assert (len(before), after, arrived(outbox)) == (3, [], ["2"])
    assert (verdicts(engine), parked(engine)) == ({other.id: "commit"}, [("dead", 3)])
    assert transaction.resolution is TransactionResolution.UNKNOWN


def test_two_halves_of_one_id_are_asked_about_as_one(outbox, producer):
    """There: each is checked on its own, and each COMMIT delivers once more."""
    message = Message("orders", "1")
    transaction = producer.begin_transaction()
    transaction.store(message)
    transaction.store(message)

    assert (len(check_back(outbox, COMMIT)), arrived(outbox), arrived(outbox)) == (1, ["1"], [])


@ONE_DATABASE
def test_nobody_alive_spends_no_attempt(engine, outbox, producer):
    """There: with the sender gone the attempts are spent on nobody."""
    one(producer)
    producer.shutdown()
    with producer_of(outbox, Listener(answer=COMMIT), "another-group") as meanwhile:
        one(meanwhile, "meanwhile")
        assert eventually(lambda: arrived(outbox) == ["meanwhile"])
    before = parked(engine)
    other = producer_of(outbox, (listener := Listener(answer=COMMIT)))
    with other:
        found = eventually(lambda: arrived(outbox) == ["1"])

    assert (before, found) == ([], True)
    assert [message.headers["TRANSACTION_CHECK_TIMES"] for message in listener.asked] == ["1"]


def test_unknown_unknown_commit_is_three_checks_and_one_delivery(engine, outbox, producer):
    one(producer)
    answers = [UNKNOW, UNKNOW, COMMIT]

    asked = check_back(outbox, lambda _: answers.pop(0), check_interval=AT_ONCE)

    assert [message.headers["TRANSACTION_CHECK_TIMES"] for message in asked] == ["1", "2", "3"]
    assert (arrived(outbox), arrived(outbox), parked(engine)) == (["1"], [], [])


def test_always_unknown_is_fifteen_checks_and_then_a_person_is_waited_for(engine, outbox, producer):
    """There: silence, and no message."""
    one(producer)

    asked = [len(check_back(outbox, UNKNOW, check_interval=AT_ONCE)) for _ in range(2)]

    assert (asked, parked(engine), arrived(outbox), verdicts(engine)) == ([15, 0], [("dead", 15)], [], {})


def test_decisions_that_race_the_checks_stand_alone(engine, outbox):
    """There: of 20 that were rolled back four were delivered, and of 20 that were committed four came twice."""
    producer = producer_of(outbox, Listener(answer=COMMIT), check_interval=timedelta(milliseconds=1))
    told: dict[str, str] = {}
    transactions = []
    with producer:
        for number in range(40):
            transaction = one(producer, str(number))
            transactions.append(transaction)
            verb = ("commit", "rollback")[number % 2]
            try:
                getattr(transaction, verb)()
                told[transaction.id] = verb
            except VerdictStandsError as error:
                told[transaction.id] = error.verdict
        # The checks go on until they have decided one more.
        transactions.append(last := one(producer, "last"))
        told[last.id] = "commit"
        assert eventually(lambda: last.id in verdicts(engine))
    bodies = [*map(str, range(40)), "last"]
    expected = [body for body, each in zip(bodies, transactions, strict=True) if told[each.id] == "commit"]

    assert verdicts(engine) == told
    assert (sorted(arrived(outbox)), arrived(outbox)) == (sorted(expected), [])
    assert len(expected) >= 21


def test_a_large_message_that_was_often_asked_about_is_delivered(engine, outbox, producer):
    """There: it grows by its check counter, cannot be stored again, and stops the queue."""
    one(producer, "x" * 4 * 1024 * 1024)
    one(producer, "small")
    for _ in range(3):
        check_back(outbox, UNKNOW, check_max=1000)
        step_clock(engine, 2 * HOUR, "outbox_parked.due_at")
    check_back(outbox, COMMIT)

    assert sorted(len(body) for body in arrived(outbox)) == [5, 4 * 1024 * 1024]


def test_an_exception_for_one_stops_no_other(engine, outbox, producer):
    """There: it aborts the pass, which stores the same messages again and again."""
    for number in range(10):
        one(producer, str(number))

    def answer(message):
        if message.body == b"3":
            raise RuntimeError
        return COMMIT

    asked = check_back(outbox, answer)

    assert (len(asked), parked(engine)) == (10, [("retry", 1)])
    assert sorted(arrived(outbox)) == [str(number) for number in range(10) if number != 3]


def test_a_consumer_sees_no_bookkeeping(outbox, producer):
    """There: TRAN_MSG, PGROUP, REAL_TOPIC, REAL_QID, and how often it was checked."""
    transaction = one(producer, headers={"a": "b"})
    check_back(outbox, UNKNOW, check_interval=timedelta(milliseconds=1), check_max=50)
    transaction.commit()

    assert [dict(message.headers) for message in delivered(outbox.database)] == [
        {"a": "b", "__transactionId__": transaction.id}
    ]


def test_a_consumer_sees_how_often_a_producer_was_asked_if_an_answer_has_committed(outbox, producer):
    transaction = one(producer, headers={"a": "b"})
    answers = [UNKNOW, COMMIT]
    check_back(outbox, lambda _: answers.pop(0), check_interval=AT_ONCE)

    assert [dict(message.headers) for message in delivered(outbox.database)] == [
        {"a": "b", "__transactionId__": transaction.id, "TRANSACTION_CHECK_TIMES": "2"}
    ]
