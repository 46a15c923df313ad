"""What a consumer costs: against a relay, against one process of eight, and against a loop that one would write."""

from __future__ import annotations

import time
from functools import partial
from multiprocessing.connection import Connection as Pipe

from sqlalchemy import text
from sqlalchemy.orm import Session

from benchmarks.drain import drain, in_a_process_of_its_own
from benchmarks.measure import Goal, Measurement, Turns, at_least
from benchmarks.partitions import PACE, run_until_told, share
from benchmarks.site import Place, Site
from outbox import Message, Outbox, create_engine
from outbox.cli.consume import NEW_OBJECTS
from outbox.consumer.consumer import Consumer

_PARTITIONS = 8
_ACCOUNTS = 1_000
_ACCOUNT_TABLE = f"""
    CREATE TABLE account (id bigint PRIMARY KEY, total bigint NOT NULL);
    INSERT INTO account SELECT n, 0 FROM generate_series(0, {_ACCOUNTS - 1}) AS n
"""
_BOOK = text("UPDATE account SET total = total + 1 WHERE id = :id")
_CLAIM_TABLE = """
    DROP TABLE IF EXISTS claimed;
    CREATE TABLE claimed (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message_id uuid NOT NULL, topic text NOT NULL, key text,
        slot smallint NOT NULL, body bytea NOT NULL, content_type text)
"""
_CLAIM = text("""
    DELETE FROM claimed WHERE id = (SELECT id FROM claimed ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING id, message_id, topic, key, body, content_type
""")


def consume_vs_relay(site: Site) -> list[Measurement]:
    """Messages a second of a consumer with a handler that does nothing, one a call, against a relay's to no sender."""
    count = site.scale.consumed
    turns = Turns("consume_vs_relay")
    with site.place() as place:
        place.fill(count)
        for number in range(site.scale.rounds):
            turns.add(_consume(place, count, f"group-{number}"), drain(place, count, f"round-{number}"))
    return [Measurement(name=turns.name, goal=at_least(0.5), unit="msg/s", ours=turns.ours, other=turns.other)]


def _consume(place: Place, count: int, name: str) -> float:
    """A consumer, as in the process of `outbox consume`; messages a second."""
    handled = 0
    consumer = Outbox(place.engine).consumer(name)

    @consumer.on("orders")
    def handle(_message: Message) -> None:
        nonlocal handled
        handled += 1

    with in_a_process_of_its_own(NEW_OBJECTS):
        started = time.perf_counter()
        consumer.until_empty()
        return rate(handled, count, started)


def consume_8_vs_1(site: Site) -> list[Measurement]:
    """Messages a second of eight processes that share 8 partitions, against one; a handler that takes 5 ms."""
    turns = Turns("consume_8_vs_1")
    with site.place() as place:
        for number in range(site.scale.rounds):
            turns.add(*(_group(place, site.scale.shared_consumed, processes, number) for processes in (8, 1)))
    return [Measurement(name=turns.name, goal=at_least(7), unit="msg/s", ours=turns.ours, other=turns.other)]


def _group(place: Place, count: int, processes: int, number: int) -> float:
    name = f"{processes}-{number}"
    receiver = partial(_sleepy, name=name)
    return share(place, name, receiver, count, processes=processes, partitions=_PARTITIONS, keyed=False)


class Sleeping:
    """A handler that takes time, and which notes when the first call began and the last ended."""

    def __init__(self, seconds: float) -> None:
        self.count, self.began, self.ended = 0, 0, 0
        self._seconds = seconds

    def __call__(self, message: Message) -> None:
        """Take the time."""
        self.began = self.began or time.monotonic_ns()
        time.sleep(self._seconds)
        self.ended = time.monotonic_ns()
        self.count += 1


def _sleepy(url: str, pipe: Pipe, *, name: str) -> None:
    """A process with a consumer."""
    sleeping = Sleeping(0.005)
    outbox = Outbox(create_engine(url))
    consumer = outbox.consumer(name, partitions=_PARTITIONS, start="latest", settings=PACE)
    consumer.on("orders")(sleeping)
    run_until_told(consumer, sleeping, pipe)


def consume_inbox(site: Site) -> list[Measurement]:
    """Messages a second of a consumer with `inbox=True` and an UPDATE, against a loop that claims, updates, commits."""
    count = site.scale.booked
    turns = Turns("consume_inbox")
    with site.place() as place:
        place.execute(_ACCOUNT_TABLE)
        place.fill(count)
        for number in range(site.scale.rounds):
            place.execute(_CLAIM_TABLE)
            place.fill(count, "claimed")
            turns.add(_book_once(place, count, f"group-{number}"), _claim_and_book(place, count))
    return [Measurement(name=turns.name, goal=at_least(0.8), unit="msg/s", ours=turns.ours, other=turns.other)]


def _book_once(place: Place, count: int, name: str) -> float:
    handled = 0
    consumer = Outbox(place.engine).consumer(name, inbox=True)

    @consumer.on("orders")
    def handle(session: Session, message: Message) -> None:
        nonlocal handled
        session.execute(_BOOK, {"id": (message.id or 0) % _ACCOUNTS})
        handled += 1

    started = time.perf_counter()
    consumer.until_empty()
    return rate(handled, count, started)


def _claim_and_book(place: Place, count: int) -> float:
    handled = 0
    started = time.perf_counter()
    while True:
        with Session(place.engine) as session, session.begin():
            row = session.execute(_CLAIM).one_or_none()
            if row is None:
                return rate(handled, count, started)
            session.execute(_BOOK, {"id": row.id % _ACCOUNTS})
        handled += 1


def filter_pushdown(site: Site) -> list[Measurement]:
    """Messages a second of a consumer whose filter takes a text in a hundred, against a handler that passes 99."""
    return [_pushed_down(site, "filter_pushdown", "price = '99.50'", at_least(10))]


def filter_pushdown_number(site: Site) -> list[Measurement]:
    """The same with a filter that compares numbers: each text has to be read and cast."""
    return [_pushed_down(site, "filter_pushdown_number", "price > 99", at_least(4))]


def _pushed_down(site: Site, name: str, filter: str, goal: Goal) -> Measurement:
    count = site.scale.filtered
    turns = Turns(name)
    with site.place() as place:
        place.fill(count, priced=True)
        for number in range(site.scale.rounds):
            pushed_down = _chosen(Outbox(place.engine).consumer(f"a-{number}", filter=filter), count)
            turns.add(pushed_down, _chosen(Outbox(place.engine).consumer(f"b-{number}"), count))
    return Measurement(name=name, goal=goal, unit="msg/s", ours=turns.ours, other=turns.other)


def _chosen(consumer: Consumer, count: int) -> float:
    taken = 0

    @consumer.on("orders")
    def handle(message: Message) -> None:
        nonlocal taken
        taken += float(message.headers["price"]) > 99

    started = time.perf_counter()
    consumer.until_empty()
    return rate(100 * taken, count, started)


def rate(came: int, expected: int, started: float) -> float:
    """Messages a second since a moment of the performance counter."""
    if came != expected:
        raise RuntimeError(f"{came} messages came, {expected} were there")
    return came / (time.perf_counter() - started)
