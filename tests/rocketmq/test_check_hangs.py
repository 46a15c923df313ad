"""Transactions about which nothing can be found out, or that cannot be decided: no other one waits for them."""

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, create_engine
from outbox.model.message import Message
from outbox.rocketmq import Transaction, TransactionMQProducer
from outbox.rocketmq.business import Business
from outbox.schema import record_metadata
from outbox.store.database import Channel
from outbox.store.half_messages.half import Way
from outbox.store.half_messages.record import RecordDatabase
from outbox.testing.servers import PostgresServer
from tests.conftest import started
from tests.rocketmq.parts import (
    COMMIT,
    HOUR,
    ONE_DATABASE,
    Listener,
    arrived,
    check_back,
    end,
    parked,
    producer_of,
    service_of,
    verdicts,
)
from tests.support.leases import step_clock
from tests.support.pausing import paused
from tests.support.readers import QUICK
from tests.support.waiting import eventually

#: The time limit of a question, which every test of a hang has to wait for; and a limit that no test reaches.
SHORT, LONG = timedelta(seconds=1), timedelta(minutes=5)
SOON = timedelta(milliseconds=50)


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    """Ends what hangs."""
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def business(tmp_path: Path) -> Iterator[Engine]:
    """A business database with records."""
    made = create_engine(f"sqlite:///{tmp_path / 'business.sqlite3'}")
    record_metadata().create_all(made)
    yield made
    made.dispose()


@pytest.fixture
def looks(business: Engine, monkeypatch: pytest.MonkeyPatch, let_go: threading.Event) -> list[str]:
    """The transactions that somebody looked for in the business database; each look hangs until it is let go."""
    seen: list[str] = []
    fence = Business.fence

    def hangs(self: Business, transaction: str, **options: Any) -> Any:
        seen.append(transaction)
        let_go.wait(120)
        return fence(self, transaction, **options)

    monkeypatch.setattr(Business, "fence", hangs)
    return seen


def begun(producer: TransactionMQProducer, way: Way, body: str) -> Transaction:
    """A transaction with a message."""
    transaction = producer.begin_transaction(verdict=way)
    transaction.send("orders", body)
    return transaction


def begun_by_all_ways(outbox: Outbox, business: Engine) -> dict[str, Transaction]:
    """Transactions of every way, in turn, that nobody has ended."""
    producer = producer_of(outbox, Listener(), business=business)
    ways: list[Way] = ["record", "join", "listener"] * 5
    found = {f"{way} {number}": begun(producer, way, f"{way} {number}") for number, way in enumerate(ways)}
    producer.shutdown()
    return found


# A business database


def test_while_a_business_database_hangs_transactions_of_other_ways_go_on(outbox, business, looks, let_go):
    """Its own are put off without a look, and uncounted; when it answers again they are looked for."""
    begun_ = begun_by_all_ways(outbox, business)
    others = {each.id for name, each in begun_.items() if not name.startswith("record")}
    service = service_of(
        outbox, lambda _: COMMIT, business=business, check_timeout=SHORT, check_interval=SOON, settings=QUICK
    )
    service.start()
    decided = eventually(lambda: set(verdicts(outbox.engine)) == others, 120)
    put_off = eventually(lambda: parked(outbox.engine) == [("retry", 0)] * 5)
    looked = list(looks)
    let_go.set()
    all_decided = eventually(lambda: set(verdicts(outbox.engine)) == {each.id for each in begun_.values()}, 120)
    end(service)

    assert (decided, put_off, all_decided) == (True, True, True)
    # On a busy machine a question may be asked again, and its answer come later.
    assert (len(looked), sorted(arrived(outbox))) == (1, sorted(n for n in begun_ if n.startswith("listener")))


@ONE_DATABASE
def test_a_business_database_that_hangs_uses_no_question_up(outbox, business, looks, let_go):
    """A listener that hangs is at fault itself; a database that hangs is away, and its transactions wait."""
    producer = producer_of(outbox, business=business)
    begun(producer, "record", "1")
    producer.shutdown()
    service = service_of(outbox, None, business=business, check_timeout=SHORT, check_interval=SOON, settings=QUICK)
    service.start()
    hangs = text("SELECT count(*) FROM outbox_parked WHERE error LIKE '%its last question hangs%'")

    def is_found_hanging() -> bool:
        with outbox.engine.connect() as connection:
            return bool(connection.execute(hangs).scalar_one())

    found = eventually(is_found_hanging)
    counted = parked(outbox.engine)
    let_go.set()
    end(service)

    assert (found, counted) == (True, [("retry", 0)])


@ONE_DATABASE
def test_a_business_database_that_hangs_is_warned_of(outbox, business, looks, let_go, caplog):
    producer = producer_of(outbox, business=business)
    transaction = begun(producer, "record", "1")
    producer.shutdown()
    service = service_of(outbox, None, business=business, check_timeout=SHORT, check_interval=SOON, settings=QUICK)
    with caplog.at_level(logging.WARNING, "outbox"):
        service.start()
        told = eventually(lambda: "its transactions wait" in caplog.text)
        let_go.set()
        end(service)

    lines = [record.getMessage() for record in caplog.records if "its transactions wait" in record.getMessage()]
    assert told
    assert lines[0].startswith("check:orders-group: the business database has not answered for ")
    assert f"(transaction {transaction.id}); its transactions wait, others go on" in lines[0]


@ONE_DATABASE
def test_connecting_to_a_business_database_has_a_time_limit(outbox, business, let_go, monkeypatch):
    """Its address leads nowhere, say."""
    producer = producer_of(outbox, Listener(), business=business)
    record, other = begun(producer, "record", "record"), begun(producer, "listener", "other")
    connect, connected = RecordDatabase.open, list[bool]()

    def hang(self: RecordDatabase) -> Channel:
        let_go.wait(120)
        connected.append(True)
        return connect(self)

    monkeypatch.setattr(RecordDatabase, "open", hang)
    check_back(outbox, COMMIT, business=business, check_timeout=SHORT, check_interval=SOON)
    before = (list(connected), verdicts(outbox.engine))
    let_go.set()
    assert eventually(lambda: connected == [True])
    step_clock(outbox.engine, HOUR, "outbox_parked.due_at")
    check_back(outbox, COMMIT, business=business)
    producer.shutdown()

    assert (before, arrived(outbox)) == (([], {other.id: "commit"}), ["other"])
    assert verdicts(outbox.engine) == {other.id: "commit", record.id: "rollback"}


@ONE_DATABASE
def test_a_server_that_keeps_its_connections_and_does_nothing_holds_up_its_own_transactions_only(outbox):
    """When it goes on, so do they."""
    with started(PostgresServer) as server:
        business = create_engine(server.create_database("business"))
        record_metadata().create_all(business)
        transactions = begun_by_all_ways(outbox, business)
        others = {each.id for name, each in transactions.items() if not name.startswith("record")}
        service = service_of(
            outbox, lambda _: COMMIT, business=business, check_timeout=SHORT, check_interval=SOON, settings=QUICK
        )
        with paused(server):
            service.start()
            decided = eventually(lambda: set(verdicts(outbox.engine)) == others, 120)
        rest = eventually(lambda: len(verdicts(outbox.engine)) == len(transactions), 120)
        end(service)
        business.dispose()

    assert (decided, rest) == (True, True)


# A listener


class Hangs:
    """A listener that answers at once, except for messages whose body says that it hangs."""

    def __init__(self, let_go: threading.Event) -> None:
        self.asked: list[str] = []
        self._let_go = let_go

    def __call__(self, message: Message) -> object:
        """Commit, some day."""
        self.asked.append(message.body.decode())
        if message.body.startswith(b"hangs"):
            self._let_go.wait(240)
        return COMMIT


def test_a_question_that_hangs_holds_up_no_other(outbox, producer, let_go):
    """Long before its time limit is over; the other threads go on with the rest of the same call.

    The first call has four questions. It is quick, so that the second one has all the others.
    """
    for body in ("0", "1", "2", "3", "hangs", *map(str, range(4, 20))):
        begun(producer, "listener", body)
    listener = Hangs(let_go)
    service = service_of(outbox, listener, check_timeout=LONG, settings=QUICK)
    service.start()
    all_asked = eventually(lambda: len(listener.asked) == 21, 120)
    let_go.set()
    decided = eventually(lambda: len(verdicts(outbox.engine)) == 21, 120)
    end(service)

    assert (all_asked, decided) == (True, True)


@pytest.mark.storm
def test_while_four_questions_hang_transactions_of_other_ways_go_on(engine, outbox, let_go):
    producer = producer_of(outbox, Listener())
    for number in range(4):
        begun(producer, "listener", f"hangs {number}")
    listener = Hangs(let_go)
    service = service_of(outbox, listener, check_timeout=SHORT, check_interval=SOON, settings=QUICK)
    service.start()
    assert eventually(lambda: len(listener.asked) == 4)
    joined = [begun(producer, "join", str(number)).id for number in range(12)]
    decided = eventually(lambda: verdicts(engine) == dict.fromkeys(joined, "rollback"), 120)
    let_go.set()
    end(service)
    producer.shutdown()

    assert decided


@ONE_DATABASE
def test_four_questions_that_hang_are_warned_of_and_counted_at_each_interval(engine, outbox, producer, let_go, caplog):
    for number in range(4):
        begun(producer, "listener", f"hangs {number}")
    begun(producer, "listener", "waits")
    service = service_of(outbox, Hangs(let_go), check_timeout=SHORT, check_interval=SOON, check_max=3, settings=QUICK)
    with caplog.at_level(logging.WARNING, "outbox"):
        service.start()
        told = eventually(lambda: "4 of 4 questions to the listener hang" in caplog.text)
        counted = eventually(lambda: parked(engine) == [("dead", 3)] * 4 + [("retry", 0)])
        lines = [each.getMessage() for each in caplog.records if "questions to the listener hang" in each.getMessage()]
        let_go.set()
        end(service)

    assert (told, counted) == (True, True)
    assert lines[0].startswith("check:orders-group: 4 of 4 questions to the listener hang, the oldest for ")
    assert "no other is asked here until one of them returns, or this process is started again" in lines[0]


@ONE_DATABASE
def test_while_four_questions_hang_another_process_of_the_group_may_ask(engine, outbox, producer, let_go, caplog):
    hangs, answers = Hangs(let_go), Listener(answer=COMMIT)
    first = service_of(outbox, hangs, check_timeout=SHORT, check_interval=SOON, settings=QUICK)
    ids = [begun(producer, "listener", f"hangs {number}").id for number in range(4)]
    first.start()
    assert eventually(lambda: len(hangs.asked) == 4)
    second = service_of(
        outbox, answers.check_local_transaction, check_timeout=LONG, check_interval=SOON, settings=QUICK
    )
    second.start()
    ids += [begun(producer, "listener", str(number)).id for number in range(4)]
    decided = eventually(lambda: verdicts(engine) == dict.fromkeys(ids, "commit"), 120)
    let_go.set()
    for service in (first, second):
        end(service)

    assert (decided, len(hangs.asked)) == (True, 4)


@ONE_DATABASE
def test_a_slow_listener_is_asked_four_questions_at_once(outbox, producer):
    """From the first call on; each question here waits until four are asked."""
    for number in range(12):
        begun(producer, "listener", str(number))
    four = threading.Barrier(4)

    def answer(_message: Message) -> object:
        four.wait(60)
        return COMMIT

    check_back(outbox, answer, check_timeout=LONG, check_interval=HOUR)

    assert len(verdicts(outbox.engine)) == 12


@ONE_DATABASE
@pytest.mark.timed("the time of each question is compared with its deadline")
def test_a_slow_listener_is_asked_four_questions_at_once_however_slow_it_is(outbox, producer):
    """So slow that a call of one question already takes more than its share of the deadline."""
    for number in range(8):
        begun(producer, "listener", str(number))
    lock, open_now, most = threading.Lock(), 0, list[int]()

    def answer(_message: Message) -> object:
        nonlocal open_now
        with lock:
            open_now += 1
            most.append(open_now)
        time.sleep(0.9)
        with lock:
            open_now -= 1
        return COMMIT

    check_back(outbox, answer, check_timeout=timedelta(seconds=1.5), check_interval=timedelta(milliseconds=1))

    # On a busy machine a question may be asked again.
    assert (max(most), len(most) >= 8, len(verdicts(outbox.engine))) == (4, True, 8)


# Transactions that cannot be decided


def test_a_half_message_of_another_hand_holds_up_no_other(engine, outbox, producer):
    """It says nothing about its transaction, so a person has to look at it."""
    transaction = producer.begin_transaction()
    transaction.send("orders", "good")
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outbox_message (message_id, topic, key, slot, tags, headers, body) SELECT"
                f" '{uuid.uuid4().hex}', topic, 'another', 0, tags, '{{}}', body FROM outbox_message"
            )
        )

    check_back(outbox, COMMIT)

    assert arrived(outbox) == ["good"]
    assert verdicts(engine) == {transaction.id: "commit"}
    assert parked(engine) == [("dead", 1)]


def test_a_message_that_the_database_refuses_holds_up_no_other(engine, outbox, producer, caplog):
    """Its transaction keeps waiting, whatever the reason is; nothing is counted."""
    for body, topic in (("1", "orders"), ("2", "cursed"), ("3", "orders")):
        producer.begin_transaction().send(topic, body)
    refuse = {
        "postgresql": [
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'never'; END$$",
            (
                "CREATE TRIGGER refuse BEFORE INSERT ON outbox_message FOR EACH ROW WHEN (NEW.topic = 'cursed')"
                " EXECUTE FUNCTION refuse()"
            ),
        ],
        "sqlite": [
            (
                "CREATE TRIGGER refuse BEFORE INSERT ON outbox_message WHEN NEW.topic = 'cursed'"
                " BEGIN SELECT RAISE(ABORT, 'never'); END"
            )
        ],
    }
    with engine.begin() as connection:
        for statement in refuse[engine.dialect.name]:
            connection.execute(text(statement))

    check_back(outbox, COMMIT)

    assert arrived(outbox) == ["1", "3"]
    assert parked(engine) == [("retry", 0)]
    assert "its verdict commit cannot be written: " in caplog.text
