"""Check-back: what listeners answer, what counts, and who else may decide meanwhile."""

import logging
import threading
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from outbox import Outbox
from outbox.errors import VerdictStandsError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Retry
from outbox.rocketmq import LocalTransactionState, TransactionMQProducer, TransactionResolution
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.checker import Checker, CheckPolicy
from outbox.rocketmq.listener import question_of
from tests.rocketmq.parts import (
    AT_ONCE,
    COMMIT,
    GROUP,
    HOUR,
    IMMUNITY,
    ONE_DATABASE,
    ROLLBACK,
    UNKNOW,
    Listener,
    arrived,
    check_back,
    end,
    half_rows,
    parked,
    producer_of,
    service_of,
    verdicts,
    wait_until_old_enough,
)
from tests.support.destination import LONG_LEASE
from tests.support.leases import step_clock
from tests.support.readers import QUICK
from tests.support.waiting import eventually


def begun(producer, *bodies):
    """A transaction with a message for each body."""
    transaction = producer.begin_transaction()
    for body in bodies or ("1",):
        transaction.send("orders", body)
    return transaction


# Answers


class Anything:
    """Equal to everything, and true."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return hash(COMMIT)


class Mute(Exception):  # noqa: N818 - what it is called does not matter
    """Cannot even be written down."""

    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


class Likeness(Enum):
    """Somebody else's states, with the same values."""

    COMMIT = "commit"


ANSWERS = {
    "an exception": RuntimeError("no database"),
    "an exception that cannot be shown": Mute(),
    "the end of the interpreter": SystemExit(0),
    "Ctrl-C": KeyboardInterrupt(),
    "None": None,
    "True": True,
    "a number": 0,
    "its name": "COMMIT_MESSAGE",
    "its value": "commit",
    "likeness": Likeness.COMMIT,
    "the class": LocalTransactionState,
    "UNKNOW": UNKNOW,
    "UNKNOWN": LocalTransactionState.UNKNOWN,
    "resolution UNKNOWN": TransactionResolution.UNKNOWN,
    "equal to everything": Anything(),
    "not to be shown": Mute,
    "an answer of HTTP": SimpleNamespace(status=200, text="COMMIT_MESSAGE", ok=True),
    "an error of HTTP": OSError(500, "Internal Server Error"),
    "a list": [COMMIT],
}


def test_what_is_no_verdict_is_unknown_and_counted_once(engine, outbox, producer):
    """All of them, each for a transaction of its own."""
    for name in ANSWERS:
        begun(producer, name)

    def answer(message):
        found = ANSWERS[message.body.decode()]
        if isinstance(found, BaseException):
            raise found
        return found() if found is Mute else found

    asked = check_back(outbox, answer)

    assert sorted(message.body.decode() for message in asked) == sorted(ANSWERS)
    assert (verdicts(engine), arrived(outbox)) == ({}, [])
    assert parked(engine) == [("retry", 1)] * len(ANSWERS)


@pytest.mark.parametrize(
    ("answer", "op", "expected"),
    [
        (COMMIT, "commit", ["1", "2"]),
        (TransactionResolution.COMMIT, "commit", ["1", "2"]),
        (ROLLBACK, "rollback", []),
        (TransactionResolution.ROLLBACK, "rollback", []),
    ],
)
def test_a_verdict_is_for_the_whole_transaction_which_is_asked_about_once(
    engine, outbox, producer, answer, op, expected
):
    transaction = begun(producer, "1", "2")

    asked = check_back(outbox, answer)

    assert [message.body for message in asked] == [b"1"]
    assert (verdicts(engine), arrived(outbox), parked(engine)) == ({transaction.id: op}, expected, [])


def test_a_checker_sees_the_message_as_it_was_sent(outbox, producer):
    transaction = producer.begin_transaction()
    sent = Message("orders", b"\0\xff", key="k", tags="t", headers={"a": "b"}, content_type="x/y")
    transaction.store(sent)

    (seen,) = check_back(outbox, UNKNOW)

    headers = {"a": "b", "__transactionId__": transaction.id, "TRANSACTION_CHECK_TIMES": "1"}
    found = (seen.message_id, seen.topic, seen.key, seen.tags, seen.headers, seen.body, seen.content_type, seen.attempt)
    assert found == (sent.message_id, "orders", "k", "t", headers, b"\0\xff", "x/y", 1)
    assert seen.transaction_id == transaction.id


class Checks:
    """The 5.x shape."""

    def check(self, message):
        """Commit."""
        return TransactionResolution.COMMIT


@pytest.mark.parametrize("listener", [Checks(), Checks().check, Listener(answer=COMMIT), lambda message: COMMIT])
def test_a_listener_a_checker_and_a_function_are_asked_alike(sqlite_engine, listener):
    outbox = Outbox(sqlite_engine)
    producer = producer_of(outbox, listener)
    begun(producer)
    with producer:
        found = eventually(lambda: arrived(outbox) == ["1"])
    outbox.close()

    assert found


def test_what_cannot_be_asked_is_refused_at_once(sqlite_engine):
    for strange in (object(), 1, "listener"):
        with pytest.raises(TypeError, match="is no listener"):
            TransactionMQProducer(GROUP, Outbox(sqlite_engine), strange)  # type: ignore[arg-type]


# A hang


@pytest.fixture
def let_go():
    """Ends what hangs."""
    event = threading.Event()
    yield event
    event.set()


def test_an_answer_that_does_not_come_in_time_is_unknown(engine, outbox, producer, let_go):
    """Also when it is a verdict in the end. The others are answered meanwhile."""
    for body in ("hangs", "1", "2"):
        begun(producer, body)

    returned: list[bytes] = []

    def answer(message):
        if message.body == b"hangs":
            let_go.wait(60)
            returned.append(message.body)
        return COMMIT

    # Others may stand still for a while.
    check_back(outbox, answer, check_timeout=timedelta(seconds=1.2))
    let_go.set()
    assert eventually(lambda: returned == [b"hangs"])

    assert (sorted(arrived(outbox)), parked(engine)) == (["1", "2"], [("retry", 1)])


@ONE_DATABASE
def test_a_transaction_whose_question_hangs_takes_no_second_thread(engine, outbox, producer, let_go):
    """With one for each try it would take all that there are, and nobody else would be asked."""
    begun(producer, "hangs")
    asked: list[bytes] = []

    def answer(message):
        asked.append(message.body)
        if message.body == b"hangs":
            let_go.wait(60)
        return COMMIT

    service = service_of(
        outbox,
        answer,
        check_interval=timedelta(milliseconds=100),
        check_timeout=timedelta(seconds=1),
        check_max=10_000,
    )
    service.start()
    assert eventually(lambda: [state for state, times in parked(engine) if times > 2] == ["retry"])
    others = [str(number) for number in range(5)]
    for other in others:
        begun(producer, other)
        assert eventually(lambda: asked.count(other.encode()) > 0)  # noqa: B023
    found = eventually(lambda: len(verdicts(engine)) == 5)
    once = asked.count(b"hangs")
    let_go.set()
    ended = eventually(lambda: len(verdicts(engine)) == 6)
    end(service)

    assert (found, once, ended) == (True, 1, True)
    assert sorted(arrived(outbox)) == [*others, "hangs"]


@ONE_DATABASE
def test_a_transaction_whose_question_hangs_for_ever_is_given_up(engine, outbox, producer, let_go):
    """Each interval counts as an UNKNOWN, although the question is asked once."""
    begun(producer, "hangs")
    asked: list[bytes] = []

    def answer(message):
        asked.append(message.body)
        let_go.wait(60)

    tenth = timedelta(milliseconds=100)
    service = service_of(outbox, answer, check_interval=tenth, check_timeout=tenth, check_max=3)
    service.start()
    given_up = eventually(lambda: parked(engine) == [("dead", 3)])
    let_go.set()
    end(service)

    assert (given_up, asked) == (True, [b"hangs"])


class Knows(Listener):
    """A listener of a program that knows some topics."""

    known_topics = ("orders", "payments.*")


def test_a_listener_is_not_asked_about_topics_that_only_another_program_knows(engine, outbox, producer):
    """Its ROLLBACK about a transaction of the other program would lose the message."""
    producer.begin_transaction().send("invoices", b"theirs")
    begun(producer, "mine")
    mine = Knows(answer=ROLLBACK)
    wait_until_old_enough(outbox)
    service_of(outbox, question_of(mine)).until_empty()
    before = parked(engine)
    step_clock(engine, 2 * HOUR, "outbox_parked.due_at")

    asked = check_back(outbox, COMMIT)

    assert [message.body for message in mine.asked] == [b"mine"]
    assert (before, [message.body for message in asked], arrived(outbox)) == ([("retry", 0)], [b"theirs"], ["theirs"])


@pytest.mark.parametrize("topics", ["orders", 7])
def test_topics_that_are_no_list_are_refused_where_the_producer_is_made(outbox, topics: Any):
    listener = Listener()
    listener.known_topics = topics  # type: ignore[attr-defined]

    with pytest.raises(TypeError, match=r"known_topics of a listener is a list of topics, not .*: write \['orders'\]"):
        producer_of(outbox, listener)


@ONE_DATABASE
def test_so_many_questions_are_asked_at_once_and_no_more(engine, outbox, producer):
    for number in range(12):
        begun(producer, str(number))
    lock, open_now, most, three = threading.Lock(), 0, 0, threading.Barrier(3)

    def answer(message):
        nonlocal open_now, most
        with lock:
            open_now += 1
            most = max(most, open_now)
        three.wait(60)
        with lock:
            open_now -= 1
        return COMMIT

    asked = check_back(outbox, answer, threads=3, check_timeout=timedelta(seconds=120))

    assert (most, len(asked), len(verdicts(engine))) == (3, 12, 12)


# Counting


def test_every_process_goes_on_counting(engine, outbox, producer):
    begun(producer)
    found = []
    for _ in range(4):
        asked = check_back(outbox, UNKNOW, check_max=3)
        found.append(([message.headers["TRANSACTION_CHECK_TIMES"] for message in asked], parked(engine)))
        step_clock(engine, 2 * HOUR, "outbox_parked.due_at")

    assert found == [
        (["1"], [("retry", 1)]),
        (["2"], [("retry", 2)]),
        (["3"], [("dead", 3)]),
        ([], [("dead", 3)]),
    ]


@pytest.mark.parametrize(("end", "expected"), [("commit", ["1"]), ("rollback", [])])
def test_after_the_last_unknown_a_producer_still_decides_and_clears_it(engine, outbox, producer, end, expected):
    transaction = begun(producer)
    check_back(outbox, UNKNOW, check_interval=AT_ONCE, check_max=2)
    before = (parked(engine), verdicts(engine), arrived(outbox))
    getattr(transaction, end)()
    asked = check_back(outbox, COMMIT)

    assert before == ([("dead", 2)], {}, [])
    assert (arrived(outbox), asked, parked(engine)) == (expected, [], [])


def test_a_verdict_clears_what_waits_for_its_next_question(engine, outbox, producer):
    transaction = begun(producer)
    check_back(outbox, UNKNOW)
    transaction.commit()
    step_clock(engine, 2 * HOUR, "outbox_parked.due_at")
    asked = check_back(outbox, ROLLBACK)

    assert (asked, parked(engine), arrived(outbox)) == ([], [], ["1"])


@pytest.mark.storm
def test_without_a_listener_nobody_is_asked_and_nothing_is_counted(engine, outbox, producer):
    begun(producer)
    for _ in range(3):
        check_back(outbox, None, check_max=1)
        step_clock(engine, 2 * HOUR, "outbox_parked.due_at")
    before = (parked(engine), verdicts(engine))
    asked = check_back(outbox, COMMIT)

    assert (before, len(asked), arrived(outbox)) == (([("retry", 0)], {}), 1, ["1"])


def test_the_listener_of_another_group_is_not_asked(outbox, producer):
    other = producer_of(outbox, Listener(), "another-group")
    begun(other, "other")
    begun(producer, "mine")
    other.shutdown()

    asked = check_back(outbox, COMMIT)

    assert ([message.body for message in asked], arrived(outbox)) == ([b"mine"], ["mine"])


@ONE_DATABASE
def test_questions_are_spread_over_a_tenth_of_the_interval(outbox, producer):
    for _ in range(3):
        begun(producer)
    rows = half_rows(outbox)
    wait_until_old_enough(outbox)
    spread = iter((0.0, 0.5, 1.0))
    checker = Checker(
        Broker(outbox, connections=1),
        GROUP,
        CheckPolicy(transaction_timeout=IMMUNITY, check_interval=HOUR),
        lambda _: UNKNOW,
        spread=lambda: next(spread),
    )
    found = checker.check(rows)
    checker.close()

    assert sorted(each.after for each in found if isinstance(each, Retry) and each.after) == [
        HOUR,
        HOUR * 1.05,
        HOUR * 1.1,
    ]


def test_two_checkers_ask_once(engine, outbox, producer):
    """Whoever has the lease; the other takes over when the first one stops."""
    listeners = [Listener(answer=UNKNOW), Listener(answer=UNKNOW)]
    settings = replace(QUICK, lease=LONG_LEASE)
    services = [service_of(outbox, each.check_local_transaction, settings=settings) for each in listeners]
    for service in services:
        service.start()
    for number in range(10):
        begun(producer, str(number))
    first = eventually(lambda: sum(len(each.asked) for each in listeners) == 10)
    stopped = 0 if listeners[0].asked else 1
    end(services[stopped])
    begun(producer, "later")
    second = eventually(lambda: len(listeners[1 - stopped].asked) == 1)
    end(services[1 - stopped])

    assert (first, second) == (True, True)
    assert [len(listeners[stopped].asked), len(listeners[1 - stopped].asked)] == [10, 1]
    assert parked(engine) == [("retry", 1)] * 11


# Verdicts meanwhile


@pytest.mark.parametrize("answer", [COMMIT, ROLLBACK, UNKNOW])
@pytest.mark.parametrize(("end", "expected"), [("commit", ["1"]), ("rollback", [])])
def test_a_verdict_while_the_question_is_asked_stands(engine, outbox, producer, caplog, end, expected, answer):
    transaction = begun(producer)

    def slow(message):
        getattr(transaction, end)()
        return answer

    with caplog.at_level(logging.WARNING, "outbox"):
        asked = check_back(outbox, slow)
    again = check_back(outbox, answer)

    contradicted = answer is not UNKNOW and answer.value != end
    assert (len(asked), again, verdicts(engine), arrived(outbox)) == (1, [], {transaction.id: end}, expected)
    assert (f"the answer was {answer.value}, but {end} stands" in caplog.text) == contradicted


def test_a_producer_that_comes_while_the_answer_is_written_learns_what_stands(engine, outbox, producer):
    """Many at once: who is told that it worked agrees with what stands."""
    transactions = [begun(producer, str(number)) for number in range(20)]
    service = service_of(outbox, lambda message: (COMMIT, ROLLBACK)[int(message.body) % 3 == 0])
    told = {}
    service.start()
    for transaction in transactions:
        try:
            transaction.commit()
            told[transaction.id] = "commit"
        except VerdictStandsError as error:
            told[transaction.id] = error.verdict
    settled = eventually(lambda: len(verdicts(engine)) == 20)
    end(service)

    expected = [str(number) for number, each in enumerate(transactions) if told[each.id] == "commit"]
    assert (settled, verdicts(engine)) == (True, told)
    assert sorted(arrived(outbox), key=int) == expected


def test_half_messages_that_are_gone_are_nobodys_question(engine, outbox, producer):
    """Somebody has deleted them."""
    begun(producer)
    rows = half_rows(outbox)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox_message"))
    checker = Checker(Broker(outbox, connections=1), GROUP, CheckPolicy(), lambda _: COMMIT)
    found = checker.check(rows)
    checker.close()

    assert (found, verdicts(engine)) == ([DONE], {})


@ONE_DATABASE
def test_a_producer_checks_back_between_its_start_and_its_shutdown(engine, outbox):
    listener = Listener(answer=COMMIT)
    producer = producer_of(outbox, listener)
    producer.start()
    begun(producer, "1")
    first = eventually(lambda: arrived(outbox) == ["1"])
    producer.shutdown()
    begun(producer, "2")
    meanwhile = producer_of(outbox, Listener(answer=COMMIT), "another-group")
    meanwhile.start()
    begun(meanwhile, "meanwhile")
    assert eventually(lambda: arrived(outbox) == ["meanwhile"])
    meanwhile.shutdown()
    between = len(listener.asked)
    producer.start()
    second = eventually(lambda: arrived(outbox) == ["2"])
    producer.shutdown()

    assert (first, between, second) == (True, 1, True)
