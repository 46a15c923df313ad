"""Messages in quick succession are settled together: soon, before anything that takes long, and at most a batch."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox import Message, Outbox, Unavailable, Verdict
from outbox.model.verdict import DONE
from outbox.runtime import failpoints
from outbox.store.log.log import Limits
from outbox.worker import partition, upkeep
from outbox.worker.calls import Call, Caller
from outbox.worker.policy import HandlerPolicy
from outbox.worker.polling import Polling
from outbox.worker.settings import Settings
from tests.support.deadlines import overdue
from tests.support.parked import states
from tests.support.readers import Collector, Worker, at_work, declared, job, send, texts, worker
from tests.support.waiting import eventually

LATER = 1e9
BRISK = Settings(
    limits=Limits(rows=3),
    poll=(timedelta(milliseconds=10), timedelta(milliseconds=10)),
    settle_within=timedelta(days=1),
)


@pytest.fixture
def outbox(engine, monkeypatch):
    """An outbox whose workers take any messages for many, and settle them when they must."""
    monkeypatch.setattr(Polling, "many", property(lambda _: True))
    monkeypatch.setattr(upkeep, "STORE_IDLE", LATER)
    monkeypatch.setattr(upkeep, "STORE_PASSED", LATER)
    return Outbox(engine)


@pytest.fixture
def any_call_is_quick(monkeypatch):
    """Have no call count as long. On a busy machine one may be, and what was handled before is settled then."""
    monkeypatch.setattr(partition, "SOON_SECONDS", 60.0)


class Handler(Collector):
    """Keeps what it is given, unless it is told what else to do with a message."""

    def __init__(self) -> None:
        super().__init__()
        self.instead: dict[bytes, Callable[[], Verdict]] = {}

    def __call__(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Done, but for those."""
        if (do := self.instead.get(messages[0].body)) is not None:
            return [do() for _ in messages]
        return super().__call__(messages)


def settles(engine: Engine) -> int:
    """How many there were by this lease; the first says where it begins."""
    with engine.connect() as connection:
        newest: int = connection.execute(text("SELECT max(n) FROM outbox_progress")).scalar_one()
    return newest - 1


def handled(outbox: Outbox, handler: Collector, *bodies: str) -> None:
    """Send each in a transaction of its own, when the one before was handled."""
    for body in bodies:
        before = len(handler.messages)
        send(outbox, body)
        assert eventually(lambda: len(handler.messages) > before)  # noqa: B023 - asked at once


def left(outbox: Outbox) -> list[str]:
    """What another worker is given."""
    handler = Collector()
    worker(outbox.database, handler).until_empty()
    return texts(handler.messages)


@pytest.mark.usefixtures("any_call_is_quick")
def test_a_stop_settles_what_was_handled(engine, outbox):
    handler = Handler()
    with at_work(worker(outbox.database, handler, settings=BRISK)):
        handled(outbox, handler, "1", "2")
        together = settles(engine)

    assert together == 0
    assert left(outbox) == []


@pytest.mark.usefixtures("any_call_is_quick")
def test_they_are_never_more_than_a_batch(engine, outbox):
    handler, found = Handler(), []
    with at_work(worker(outbox.database, handler, settings=BRISK)):
        for number in range(8):
            handled(outbox, handler, str(number))
            found.append(settles(engine))

    assert found == [0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.usefixtures("any_call_is_quick")
def test_nor_are_they_larger_than_a_batch(engine, outbox):
    handler, found = Handler(), []
    few_bytes = replace(BRISK, limits=Limits(rows=3, bytes=2500))
    with at_work(worker(outbox.database, handler, settings=few_bytes)):
        for number in range(5):
            handled(outbox, handler, str(number) * 1000)
            found.append(settles(engine))

    assert found == [0, 0, 1, 1, 2]


def test_they_are_settled_soon_when_no_more_come(engine, outbox):
    handler, soon = Handler(), replace(BRISK, settle_within=timedelta(seconds=0.05))
    with at_work(worker(outbox.database, handler, settings=soon)):
        handled(outbox, handler, "1")
        assert eventually(lambda: settles(engine) == 1)


def test_they_are_settled_while_a_call_takes_long(engine, outbox):
    handler, meanwhile = Handler(), list[bool]()

    def slow() -> Verdict:
        meanwhile.append(eventually(lambda: settles(engine) == 1))
        return DONE

    handler.instead[b"2"] = slow
    patient = HandlerPolicy(deadline=timedelta(minutes=2))
    with at_work(worker(outbox.database, handler, settings=BRISK, policy=patient)):
        handled(outbox, handler, "1")
        send(outbox, "2")
        assert eventually(lambda: meanwhile)

    assert meanwhile == [True]


def test_they_are_settled_before_a_turn_is_waited_for(engine, outbox):
    """Another worker's call of the same handler may take long."""
    handler, others = Handler(), threading.Event()
    handler.instead[b"other"] = lambda: DONE if others.wait(60) else Unavailable("never")
    caller = Caller()
    with at_work(Worker(outbox.database, [job(declared(), handler, caller=caller)], BRISK)):
        handled(outbox, handler, "1")
        caller.begin(Call([Message("orders", b"other")]), handler)
        send(outbox, "2")
        meanwhile = eventually(lambda: settles(engine) == 1)
        before = texts(handler.messages)
        others.set()
        assert eventually(lambda: texts(handler.messages) == ["1", "2"])

    assert (meanwhile, before) == (True, ["1"])


def test_they_are_settled_before_an_outage_is_waited_for(engine, outbox):
    handler, found = Handler(), list[int]()

    def away() -> Verdict:
        found.append(settles(engine))
        return Unavailable("down")

    handler.instead[b"2"] = away
    with at_work(worker(outbox.database, handler, settings=BRISK)):
        handled(outbox, handler, "1")
        send(outbox, "2")
        assert eventually(lambda: len(found) == 2)

    assert found[1] == 1
    assert left(outbox) == ["2"]


def test_a_batch_that_a_stop_leaves_open_does_not_take_them_back(outbox):
    handler = Handler()
    busy = worker(outbox.database, handler, settings=BRISK)
    with at_work(busy):
        handled(outbox, handler, "1")

        def stopped() -> Verdict:
            busy.stop()
            return Unavailable("down")

        handler.instead[b"2"] = stopped
        send(outbox, "2", "3")
        assert eventually(lambda: not busy.stopping)

    assert left(outbox) == ["2", "3"]


def test_a_batch_that_is_left_open_while_work_goes_on_does_not_repeat_them(engine, outbox):
    """A command wants the lease and cannot have it, because a call hangs: the worker goes on where it was."""
    handler, released, asks = Handler(), threading.Event(), list[bool]()
    busy = worker(outbox.database, handler, settings=BRISK)

    def hangs() -> Verdict:
        released.wait(60)
        return DONE

    def reached(name: str) -> None:
        if name == "worker.after_fetch" and asks:
            for turn in busy._subscriptions[0].turns.values():
                turn.held.stop.ask()

    handler.instead[b"hangs"] = hangs
    send(outbox, "hangs")
    thread = threading.Thread(target=busy.run)
    with overdue(lambda messages: messages[0].body == b"hangs"):
        thread.start()
        try:
            assert eventually(lambda: states(engine) == {"waiting": 1})
            handled(outbox, handler, "1")
            before = settles(engine)
            failpoints.arm(reached)
            asks.append(True)
            send(outbox, "2")
            settled = eventually(lambda: settles(engine) > before)
            asks.clear()
            assert eventually(lambda: len(handler.messages) >= 2)
        finally:
            failpoints.arm(None)
            released.set()
            busy.stop()
            thread.join(60)

    assert (settled, texts(handler.messages)) == (True, ["1", "2"])


def test_they_are_settled_soon_also_while_more_come(engine, outbox, monkeypatch):
    """Each new one does not put it off. Here no call takes so long that they are settled meanwhile."""
    monkeypatch.setattr(partition, "SOON_SECONDS", 60.0)
    handler = Handler()
    soon = replace(BRISK, limits=Limits(rows=1_000_000), settle_within=timedelta(seconds=1))
    with at_work(worker(outbox.database, handler, settings=soon)):

        def another_and_settled() -> bool:
            handled(outbox, handler, "more")
            return settles(engine) > 0

        assert eventually(another_and_settled)


def test_what_is_parked_is_settled_with_them_at_once(engine, outbox):
    handler = Handler()
    with at_work(worker(outbox.database, handler, settings=BRISK)):
        handled(outbox, handler, "1")
        with outbox.begin() as session:
            outbox.send(session, "orders", "later", delay=timedelta(hours=1))
        assert eventually(lambda: settles(engine) == 1)

    assert left(outbox) == []


@contextmanager
def losing_the_database(until: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """The worker loses its connection when it reads next, and again until then."""
    lost = [0]

    def reached(name: str) -> None:
        if name == "worker.before_fetch" and not (lost[0] and until()):
            lost[0] += 1
            raise PoolTimeout

    failpoints.arm(reached)
    try:
        yield
        assert eventually(lambda: lost[0] and until())
    finally:
        failpoints.arm(None)


@pytest.mark.every_database
def test_a_lost_connection_repeats_none_of_them(engine, outbox):
    handler = Handler()
    with at_work(worker(outbox.database, handler, settings=BRISK)):
        handled(outbox, handler, "1", "2")
        with losing_the_database():
            pass
        handled(outbox, handler, "3")

    assert (texts(handler.messages), left(outbox)) == (["1", "2", "3"], [])


@pytest.mark.storm
def test_nor_do_they_expire_when_a_connection_is_lost(engine, outbox):
    """They have arrived in time, and are not settled when their time is over."""
    handler, moment = Handler(), datetime.now(UTC) + timedelta(seconds=2)
    with at_work(worker(outbox.database, handler, settings=BRISK)):
        with outbox.begin() as session:
            outbox.send(session, "orders", "1", expires_at=moment)
        assert eventually(lambda: handler.messages)
        with losing_the_database(until=lambda: datetime.now(UTC) > moment + timedelta(seconds=0.5)):
            pass
        handled(outbox, handler, "2")

    assert (texts(handler.messages), states(engine), left(outbox)) == (["1", "2"], {}, [])


def test_they_come_again_after_a_crash_of_the_server(pg_engine, monkeypatch):
    """What their handler has stored there may be gone. A reset of the statistics looks like the crash of a backend."""
    monkeypatch.setattr(Polling, "many", property(lambda _: True))
    monkeypatch.setattr(upkeep, "STORE_IDLE", LATER)
    monkeypatch.setattr(upkeep, "STORE_PASSED", LATER)
    outbox, handler = Outbox(pg_engine), Handler()
    with at_work(worker(outbox.database, handler, settings=BRISK)):
        handled(outbox, handler, "1")
        with pg_engine.connect() as connection:
            connection.execute(text("SELECT pg_stat_reset_shared('bgwriter')"))
        again = eventually(lambda: len(handler.messages) >= 2)

    assert (again, texts(handler.messages)) == (True, ["1", "1"])


@pytest.mark.storm
def test_a_worker_without_its_lease_settles_none_of_them(engine, outbox):
    """Another worker is given them again."""
    handler = Handler()
    busy = worker(outbox.database, handler, settings=BRISK)
    with at_work(busy):
        handled(outbox, handler, "1")
        with engine.begin() as connection:
            connection.execute(text("UPDATE outbox_lease SET epoch = epoch + 1, owner = 'another'"))

    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_lease SET owner = NULL"))
    assert left(outbox) == ["1"]


def test_few_messages_are_settled_one_by_one(engine):
    """A crash between them repeats none that was settled."""
    outbox, handler = Outbox(engine), Handler()
    with at_work(worker(outbox.database, handler, settings=BRISK)):
        for number in range(3):
            handled(outbox, handler, str(number))
            assert eventually(lambda: settles(engine) == number + 1)  # noqa: B023 - asked at once
