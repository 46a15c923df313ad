"""A relay that ends within a batch: what it has handed over is not repeated, what it has not is not lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from outbox import HungHandlerError, Message, Outbox, Relay, Retry, Unavailable, Verdict
from outbox.model.verdict import DONE
from outbox.runtime import failpoints
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings
from tests.support.destination import Answer, Destination, relay_to
from tests.support.parked import states
from tests.support.waiting import eventually

COUNT, KEYS = 600, 45
EVERYTHING = [b"%d" % n for n in range(COUNT)]
#: Calls hang here by a deadline of a second.
pytestmark = pytest.mark.alone
DEADLINE = timedelta(seconds=1)
#: A call may take a quarter of its deadline: with so much a message it holds 125 of them.
SLOW = 0.002

#: All messages fit into one read of the log, or they are a window that is read page by page.
batch_sizes = pytest.mark.parametrize("rows", [1000, 200], ids=["whole", "paged"])
#: For tests that wait ten seconds for calls that hang.
slow_batch_sizes = pytest.mark.parametrize(
    "rows", [pytest.param(1000, marks=pytest.mark.full), 200], ids=["whole", "paged"]
)


def key_of(n: int) -> str | None:
    """One in three has no key; the two behind it share one."""
    return f"k{n // 3 % KEYS}" if n % 3 else None


def number(message: Message) -> int:
    return int(message.body)


class Slow(Destination):
    """Takes its time for each message."""

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """As long as the messages are many."""
        time.sleep(SLOW * len(messages))
        return super().send(messages)


class Unanswering(Destination):
    """Never answers a call with one of the `bad` messages. What it held has arrived, or has not."""

    def __init__(self, bad: set[int], *, arrives: bool) -> None:
        super().__init__()
        self.unanswered: list[bytes] = []
        self.released = threading.Event()
        self._bad = bad
        self._arrives = arrives

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Hang until released, then fail."""
        if self._bad.isdisjoint(map(number, messages)):
            return super().send(messages)
        self.unanswered += [message.body for message in messages]
        if self._arrives:
            self.messages += messages
        self.released.wait(60)
        raise ConnectionError


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """All messages are in the log, committed together."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", str(n), key=key_of(n)) for n in range(COUNT)])
    return outbox


def relay_of(outbox: Outbox, destination: Destination, rows: int, deadline: timedelta = DEADLINE) -> Relay:
    return relay_to(destination, outbox, settings=Settings(limits=Limits(rows=rows)), deadline=deadline)


def stopped_at(n: int, outbox: Outbox, destination: Destination, rows: int) -> None:
    """Let a relay work until the destination is asked about message `n` or a later one."""
    relay, answer = relay_of(outbox, destination, rows), destination.answer

    def stopping(message: Message) -> Verdict:
        if number(message) >= n:
            relay.stop()
        return answer(message)

    destination.answer = stopping
    relay.until_empty()


def delivered_after(outbox: Outbox, destination: Destination, rows: int) -> list[bytes]:
    """What has arrived once another relay has worked until nothing is left, with a healthy destination."""
    second = Destination()
    # Of another process, which knows nothing of the calls that hang in the first one's.
    relay = relay_of(Outbox(outbox.engine), second, rows)

    def empty() -> bool:
        relay.until_empty()
        return states(outbox.engine) == {}

    assert eventually(empty)
    return destination.bodies + second.bodies


def lost_and_repeated(arrived: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """What has not arrived, and what has arrived more than once, as often as it was one too many."""
    there, wanted = Counter(arrived), Counter(EVERYTHING)
    return sorted((wanted - there).elements()), sorted((there - wanted).elements())


def by_key(bodies: Sequence[bytes]) -> dict[str, list[int]]:
    """The numbers of each key, in the order in which they arrived first."""
    found: dict[str, list[int]] = {}
    for n in map(int, dict.fromkeys(bodies)):
        if (key := key_of(n)) is not None:
            found.setdefault(key, []).append(n)
    return found


IN_ORDER = by_key(EVERYTHING)


@batch_sizes
@pytest.mark.parametrize("n", [40, 250])
def test_a_stop_in_the_middle_loses_and_repeats_nothing(outbox, rows, n):
    first = Slow()
    stopped_at(n, outbox, first, rows)
    before, parked = len(first.bodies), states(outbox.engine)

    arrived = delivered_after(outbox, first, rows)

    assert n < before < COUNT, "the batch was whole: nothing was tried"
    assert parked == {}
    assert lost_and_repeated(arrived) == ([], [])
    assert arrived == EVERYTHING


@pytest.mark.parametrize(
    "bad",
    [lambda n: n >= 250, lambda n: n >= 250 and n % 2],
    ids=["the rest", "every second"],
)
@pytest.mark.parametrize("verdict", [Retry("not now", timedelta(0)), Unavailable("not there")], ids=["retry", "away"])
@batch_sizes
def test_a_stop_after_a_call_that_failed_in_part_loses_and_repeats_nothing(outbox, rows, verdict, bad):
    """The last message that was handled is one that was parked, or was done."""
    first = Slow(lambda message: verdict if bad(number(message)) else DONE)
    stopped_at(250, outbox, first, rows)
    before = len(first.bodies)

    arrived = delivered_after(outbox, first, rows)

    assert 190 < before < COUNT
    assert lost_and_repeated(arrived) == ([], [])
    assert by_key(arrived) == IN_ORDER


@batch_sizes
def test_a_stop_after_a_call_that_raised_loses_and_repeats_nothing(outbox, rows):
    """Nobody knows yet whose fault it was: the message and the next of its key are open, a later one is done."""
    poison = 250
    assert key_of(poison) == key_of(poison + 1) != key_of(poison + 2)
    first = Slow(raising(poison))
    stopped_at(poison + 1, outbox, first, rows)
    before, parked = first.bodies, states(outbox.engine)

    arrived = delivered_after(outbox, first, rows)

    assert before == [*EVERYTHING[:poison], EVERYTHING[poison + 2]]
    assert parked == {"waiting": 2}
    assert lost_and_repeated(arrived) == ([], [])
    assert by_key(arrived) == IN_ORDER


@pytest.mark.parametrize("arrives", [True, False], ids=["arrived", "lost"])
@slow_batch_sizes
def test_a_stop_beside_a_call_that_hangs_repeats_that_call_only(outbox, rows, arrives):
    """Later messages are done already, so what the call holds is parked before the progress moves past it."""
    first = Unanswering({5}, arrives=arrives)
    stopped_at(150, outbox, first, rows)
    last = max(map(int, first.bodies))

    arrived = delivered_after(outbox, first, rows)
    first.released.set()

    # The call held a part of what was handled, however quick the calls before were.
    assert 0 < len(first.unanswered) < 150
    assert last >= 150
    assert lost_and_repeated(arrived) == ([], sorted(first.unanswered) if arrives else [])
    assert by_key(arrived) == IN_ORDER


@pytest.mark.parametrize("arrives", [True, False], ids=["arrived", "lost"])
@slow_batch_sizes
def test_a_relay_that_gives_up_repeats_the_calls_that_hang_only(outbox, rows, arrives):
    first = Unanswering(set(range(5, COUNT, 20)), arrives=arrives)
    with pytest.raises(HungHandlerError):
        relay_of(outbox, first, rows, timedelta(seconds=0.5)).until_empty()
    before = set(first.bodies)

    arrived = delivered_after(outbox, first, rows)
    first.released.set()

    assert len(before) < COUNT
    assert first.unanswered
    assert lost_and_repeated(arrived) == ([], sorted(first.unanswered) if arrives else [])
    assert by_key(arrived) == IN_ORDER


@batch_sizes
def test_a_call_that_comes_back_while_its_relay_gives_up_costs_nothing(outbox, rows):
    """The relay goes on from what it has just settled: the last message, of the page too, has a key of that call."""
    poison, held = 50, {key_of(n) for n in range(9, 73)}
    assert {key_of(199), key_of(COUNT - 1)} <= held
    destination = Destination()
    hangs, unanswered, threads, points = True, set[bytes](), set[threading.Thread](), set[str]()

    def hanging(messages: Sequence[Message]) -> bool:
        held = hangs and any(number(message) == poison for message in messages)
        if held:
            unanswered.update(message.body for message in messages)
            threads.add(threading.current_thread())
        return held

    def reached(point: str) -> None:
        nonlocal hangs
        points.add(point)
        # Before, only what precedes the call was settled; now what the call holds is parked.
        if point == "worker.after_settle" and "worker.after_park" in points:
            hangs = False
            for thread in threads:
                thread.join(60)

    destination.hanging = hanging
    relay = relay_of(outbox, destination, rows, timedelta(seconds=0.5))
    failpoints.arm(reached)
    try:
        relay.start()
        arrived = eventually(lambda: len(set(destination.bodies)) == COUNT and states(outbox.engine) == {})
    finally:
        failpoints.arm(None)
        relay.stop()
        relay.join(60)

    lost, repeated = lost_and_repeated(destination.bodies)
    assert (arrived, lost) == (True, [])
    assert unanswered.issuperset(repeated)
    assert by_key(destination.bodies) == IN_ORDER


def test_what_was_not_committed_at_a_stop_comes_after_it(pg_engine):
    """Its ids lie before where the stopped relay came to, and its transaction is none of that window."""
    outbox, first = Outbox(pg_engine), Slow()
    with pg_engine.connect() as late:
        outbox.send_all(late, [Message("late", str(n)) for n in range(100, 110)])
        with outbox.begin() as session:
            outbox.send_all(session, [Message("orders", str(n)) for n in range(100)])
        stopped_at(20, outbox, first, 1000)
        late.commit()
    before = len(first.bodies)

    arrived = delivered_after(outbox, first, 1000)

    assert 20 < before < 100
    assert [int(body) for body in arrived] == list(range(110))


def raising(poison: int) -> Answer:
    """Accept all but one."""

    def answer(message: Message) -> Verdict:
        if number(message) == poison:
            raise ValueError("cannot take this")
        return DONE

    return answer
