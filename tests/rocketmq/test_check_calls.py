"""Calls of a checker that overlap: one that is past its deadline goes on beside the next one."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.model.message import Message
from outbox.model.verdict import DONE, Retry, Verdict
from outbox.rocketmq import TransactionMQProducer
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.checker import Checker, CheckPolicy
from outbox.runtime import failpoints
from outbox.runtime.stop import Stop
from outbox.store.half_messages.op import DecidedHalves
from outbox.worker.deferral import Deferral
from tests.rocketmq.parts import (
    COMMIT,
    GROUP,
    HOUR,
    IMMUNITY,
    Listener,
    arrived,
    end,
    half_rows,
    parked,
    producer_of,
    service_of,
    verdicts,
)
from tests.support.readers import QUICK
from tests.support.waiting import eventually


class Held:
    """Holds the first thread that is about to commit a verdict, until it is let go; then it fails."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def reached(self, name: str) -> None:
        """Hold the first one that comes here."""
        if name == "check.in_end":
            with self._lock:
                first = not self.inside.is_set()
                self.inside.set()
            if first:
                assert self.go.wait(120)
                raise RuntimeError("the connection is lost")


@pytest.fixture
def held() -> Iterator[Held]:
    """Armed for the first verdict of the test."""
    made = Held()
    failpoints.arm(made.reached)
    yield made
    made.go.set()
    failpoints.arm(None)


@pytest.fixture
def pg_outbox(pg_engine: Engine) -> Iterator[Outbox]:
    """An outbox on PostgreSQL, where two transactions write at the same time."""
    made = Outbox(pg_engine)
    yield made
    made.close()


@pytest.fixture
def pg_producer(pg_outbox: Outbox) -> Iterator[TransactionMQProducer]:
    """A producer that does not check back by itself."""
    made = producer_of(pg_outbox, Listener())
    yield made
    made.shutdown()


def begun(producer: TransactionMQProducer, body: str) -> str:
    """The id of a transaction with a message."""
    transaction = producer.begin_transaction()
    transaction.send("orders", body)
    return transaction.id


def checker_of(outbox: Outbox, question: Any = lambda _: COMMIT, *, threads: int = 4) -> Checker:
    broker = Broker(outbox, connections=1)
    return Checker(
        broker, GROUP, CheckPolicy(transaction_timeout=IMMUNITY, check_interval=HOUR, threads=threads), question
    )


def in_a_thread(checker: Checker, rows: list[Message]) -> tuple[threading.Thread, list[Verdict]]:
    """A call of the checker, and where its verdicts will be."""
    found: list[Verdict] = []
    thread = threading.Thread(target=lambda: found.extend(checker.check(rows)))
    thread.start()
    return thread, found


def test_a_call_that_is_taken_back_takes_back_no_verdict_of_another_call(pg_engine, pg_outbox, pg_producer, held):
    """What was answered with Done is settled, and nobody would look at it again."""
    late, other = begun(pg_producer, "late"), begun(pg_producer, "other")
    rows = {row.key: row for row in half_rows(pg_outbox)}
    checker = checker_of(pg_outbox)
    thread, first = in_a_thread(checker, [rows[late]])
    assert held.inside.wait(60)

    second = checker.check([rows[other]])
    held.go.set()
    thread.join(60)
    checker.close()

    assert [(type(each), getattr(each, "counts", None)) for each in first] == [(Retry, False)]
    assert (second, verdicts(pg_engine), arrived(pg_outbox)) == ([DONE], {other: "commit"}, ["other"])


@pytest.mark.storm
def test_every_transaction_is_decided_though_a_call_fails_long_after_its_deadline(
    pg_engine, pg_outbox, pg_producer, held
):
    late = begun(pg_producer, "late")
    service = service_of(
        pg_outbox,
        lambda _: COMMIT,
        check_timeout=timedelta(milliseconds=250),
        check_interval=timedelta(milliseconds=50),
        settings=QUICK,
    )
    service.start()
    assert held.inside.wait(60)
    others = [begun(pg_producer, str(number)) for number in range(3)]
    decided = eventually(lambda: set(verdicts(pg_engine)) == set(others), 120)
    held.go.set()
    all_decided = eventually(lambda: set(verdicts(pg_engine)) == {late, *others}, 120)
    end(service)

    assert (decided, all_decided) == (True, True)
    assert (sorted(arrived(pg_outbox)), parked(pg_engine)) == (["0", "1", "2", "late"], [])


def test_many_calls_at_once_decide_on_everything_they_call_done(pg_engine, pg_outbox, pg_producer):
    ids = [begun(pg_producer, str(number)) for number in range(40)]
    rows = half_rows(pg_outbox)
    checker = checker_of(pg_outbox, threads=len(rows))
    calls = [in_a_thread(checker, rows[number::8]) for number in range(8)]
    for thread, _ in calls:
        thread.join(120)
    checker.close()

    assert [found for _, found in calls] == [[DONE] * 5] * 8
    assert verdicts(pg_engine) == dict.fromkeys(ids, "commit")


def test_a_verdict_that_did_not_last_is_not_done(engine, outbox, producer):
    """A crash of the server may take back what it had confirmed."""
    transaction = begun(producer, "1")
    rows = half_rows(outbox)

    def take_back(name: str) -> None:
        if name == "check.after_end":
            with engine.begin() as connection:
                connection.execute(text("DELETE FROM outbox_op"))

    checker = checker_of(outbox)
    failpoints.arm(take_back)
    try:
        (first,) = checker.check(rows)
    finally:
        failpoints.arm(None)
    (again,) = checker.check(rows)
    checker.close()

    assert isinstance(first, Retry)
    assert (first.counts, again, verdicts(engine)) == (False, DONE, {transaction: "commit"})


def test_calls_at_once_share_the_limit_of_questions_and_ask_nobody_twice(outbox, producer):
    """Each transaction is asked about by one of them."""
    for number in range(8):
        begun(producer, str(number))
    rows = half_rows(outbox)
    asked: list[str] = []
    go, four = threading.Event(), threading.Barrier(5)

    def answer(message: Message) -> object:
        asked.append(message.body.decode())
        four.wait(60)
        go.wait(60)
        return COMMIT

    checker = checker_of(outbox, answer)
    thread, first = in_a_thread(checker, rows[:4])
    four.wait(60)
    second = checker.check(rows)
    at_once = sorted(asked)
    go.set()
    thread.join(60)
    checker.close()

    assert (at_once, first) == (["0", "1", "2", "3"], [DONE] * 4)
    assert [(type(each), getattr(each, "counts", None)) for each in second] == [(Retry, False)] * 8


@pytest.mark.storm
def test_a_call_that_comes_back_late_and_at_a_loss_does_not_end_the_service(pg_outbox, pg_producer, monkeypatch):
    """The call after it was at a loss before; while this one hangs, the lease is not left to others."""
    began, at_a_loss, real = threading.Event(), threading.Event(), DecidedHalves.pending

    def slow_at_first(*arguments: Any, **options: Any) -> Any:
        if not began.is_set():
            began.set()
            assert at_a_loss.wait(120)
        return real(*arguments, **options)

    monkeypatch.setattr(DecidedHalves, "pending", slow_at_first)
    for body in "12345678":
        begun(pg_producer, body)
    ask, begin, deferrals = Deferral.ask, Deferral.begin, list[Deferral]()

    def asked(self: Deferral, why: str) -> None:
        at_a_loss.set()
        ask(self, why)

    def taken_again(self: Deferral, stop: Stop | None) -> None:
        if self.asked:
            deferrals.append(self)
        begin(self, stop)

    monkeypatch.setattr(Deferral, "ask", asked)
    monkeypatch.setattr(Deferral, "begin", taken_again)
    service = service_of(
        pg_outbox, None, check_timeout=timedelta(milliseconds=200), check_interval=timedelta(seconds=1)
    )
    service.start()
    again = eventually(lambda: len(deferrals) == 2 or not service.alive)
    alive = service.alive
    end(service)

    assert (again, alive) == (True, True)
