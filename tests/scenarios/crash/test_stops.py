"""A relay that ends within a batch: what it has handed over is not repeated, what it has not is not lost."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from outbox import HungHandlerError, Message, Outbox, Relay, Retry, Unavailable, Verdict
from outbox.model.verdict import DONE
from outbox.runtime import failpoints
from outbox.store.log.log import Limits
from outbox.worker.calls import Call
from outbox.worker.settings import Settings
from tests.support.destination import LONG_LEASE, Answer, Destination, relay_to
from tests.support.leases import end_lease
from tests.support.parked import states
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

COUNT, KEYS = 600, 45
EVERYTHING = [b"%d" % n for n in range(COUNT)]
#: Of calls that hang, and see `only_late`; no other call is late.
DEADLINE = timedelta(seconds=1)
PATIENCE = timedelta(hours=1)

#: All messages fit into one read of the log, or they are a window that is read page by page.
batch_sizes = pytest.mark.parametrize("rows", [1000, 200], ids=["whole", "paged"])
#: For a test that waits for many calls that hang.
slow_batch_sizes = pytest.mark.parametrize(
    "rows", [pytest.param(1000, marks=pytest.mark.full), 200], ids=["whole", "paged"]
)


def key_of(n: int) -> str | None:
    """One in three has no key; the two behind it share one."""
    return f"k{n // 3 % KEYS}" if n % 3 else None


def number(message: Message) -> int:
    return int(message.body)


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
        if not self.hangs(messages):
            return super().send(messages)
        self.unanswered += [message.body for message in messages]
        if self._arrives:
            self.messages += messages
        self.released.wait(600)
        raise ConnectionError

    def hangs(self, messages: Sequence[Message]) -> bool:
        """Whether a call with these messages gets no answer."""
        return not self._bad.isdisjoint(map(number, messages))


@pytest.fixture
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of at most 125 messages, however long they take: a call may take a quarter of its deadline."""
    monkeypatch.setattr(Call, "seconds", property(lambda call: len(call.messages) * call.deadline / 500))


def only_late(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[Sequence[Message]], bool]) -> None:
    """Have no call pass its deadline but those that hang, however long this process stands still."""
    late: set[Call] = set()

    def due(call: Call) -> float:
        if hangs(call.messages):
            late.add(call)
        return math.inf if call.started is None or call not in late else call.started + call.deadline

    monkeypatch.setattr(Call, "due", property(due))


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """All messages are in the log, committed together."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", str(n), key=key_of(n)) for n in range(COUNT)])
    return outbox


def relay_of(outbox: Outbox, destination: Destination, rows: int, deadline: timedelta = PATIENCE) -> Relay:
    settings = Settings(limits=Limits(rows=rows), lease=LONG_LEASE)
    return relay_to(destination, outbox, settings=settings, deadline=deadline)


def stopped_at(n: int, outbox: Outbox, destination: Destination, rows: int, deadline: timedelta = PATIENCE) -> None:
    """Let a relay work until the destination is asked about message `n` or a later one."""
    relay, answer = relay_of(outbox, destination, rows, deadline), destination.answer

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

    assert eventually(empty, 300)
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


@pytest.mark.usefixtures("small_calls")
@batch_sizes
@pytest.mark.parametrize("n", [40, 250])
def test_a_stop_in_the_middle_loses_and_repeats_nothing(outbox, rows, n):
    first = Destination()
    stopped_at(n, outbox, first, rows)
    before, parked = len(first.bodies), states(outbox.engine)

    arrived = delivered_after(outbox, first, rows)

    assert n < before < COUNT, "the batch was whole: nothing was tried"
    assert parked == {}
    assert lost_and_repeated(arrived) == ([], [])
    assert arrived == EVERYTHING


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize(
    "bad",
    [lambda n: n >= 250, lambda n: n >= 250 and n % 2],
    ids=["the rest", "every second"],
)
@pytest.mark.parametrize("verdict", [Retry("not now", timedelta(0)), Unavailable("not there")], ids=["retry", "away"])
@batch_sizes
def test_a_stop_after_a_call_that_failed_in_part_loses_and_repeats_nothing(outbox, rows, verdict, bad):
    """The last message that was handled is one that was parked, or was done."""
    first = Destination(lambda message: verdict if bad(number(message)) else DONE)
    stopped_at(250, outbox, first, rows)
    before = len(first.bodies)

    arrived = delivered_after(outbox, first, rows)

    assert 190 < before < COUNT
    assert lost_and_repeated(arrived) == ([], [])
    assert by_key(arrived) == IN_ORDER


@pytest.mark.usefixtures("small_calls")
@batch_sizes
def test_a_stop_after_a_call_that_raised_loses_and_repeats_nothing(outbox, rows):
    """Nobody knows yet whose fault it was: the message and the next of its key are open, a later one is done."""
    poison = 250
    assert key_of(poison) == key_of(poison + 1) != key_of(poison + 2)
    first = Destination(raising(poison))
    stopped_at(poison + 1, outbox, first, rows)
    before, parked = first.bodies, states(outbox.engine)

    arrived = delivered_after(outbox, first, rows)

    assert before == [*EVERYTHING[:poison], EVERYTHING[poison + 2]]
    assert parked == {"waiting": 1, "behind": 1}
    assert lost_and_repeated(arrived) == ([], [])
    assert by_key(arrived) == IN_ORDER


@pytest.mark.parametrize("arrives", [True, False], ids=["arrived", "lost"])
@batch_sizes
def test_a_stop_beside_a_call_that_hangs_repeats_that_call_only(outbox, rows, arrives, monkeypatch):
    """Later messages are done already, so what the call holds is parked before the progress moves past it."""
    first = Unanswering({5}, arrives=arrives)
    only_late(monkeypatch, first.hangs)
    stopped_at(150, outbox, first, rows, DEADLINE)
    last = max(map(int, first.bodies))
    end_lease(outbox.engine)

    arrived = delivered_after(outbox, first, rows)
    first.released.set()

    # The call held a part of what was handled.
    assert 0 < len(first.unanswered) < 150
    assert last >= 150
    assert lost_and_repeated(arrived) == ([], sorted(first.unanswered) if arrives else [])
    assert by_key(arrived) == IN_ORDER


@pytest.mark.parametrize("arrives", [True, False], ids=["arrived", "lost"])
@slow_batch_sizes
def test_a_relay_that_gives_up_repeats_the_calls_that_hang_only(outbox, rows, arrives, monkeypatch):
    first = Unanswering(set(range(5, COUNT, 20)), arrives=arrives)
    only_late(monkeypatch, first.hangs)
    with pytest.raises(HungHandlerError):
        relay_of(outbox, first, rows, timedelta(seconds=0.5)).until_empty()
    before = set(first.bodies)
    end_lease(outbox.engine)

    arrived = delivered_after(outbox, first, rows)
    first.released.set()

    assert len(before) < COUNT
    assert first.unanswered
    assert lost_and_repeated(arrived) == ([], sorted(first.unanswered) if arrives else [])
    assert by_key(arrived) == IN_ORDER


@batch_sizes
def test_a_call_that_comes_back_while_its_relay_gives_up_costs_nothing(outbox, rows, monkeypatch):
    """The relay goes on from what it has just settled: the last message, of the page too, has a key of that call."""
    poison, held = 50, {key_of(n) for n in range(9, 73)}
    assert {key_of(199), key_of(COUNT - 1)} <= held
    destination = Destination()
    hangs, unanswered, threads, points = True, set[bytes](), set[threading.Thread](), set[str]()

    def hangs_with(messages: Sequence[Message]) -> bool:
        return hangs and any(number(message) == poison for message in messages)

    def hanging(messages: Sequence[Message]) -> bool:
        held = hangs_with(messages)
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
                thread.join(600)

    destination.hanging = hanging
    only_late(monkeypatch, hangs_with)
    relay = relay_of(outbox, destination, rows, timedelta(seconds=0.5))
    failpoints.arm(reached)
    try:
        relay.start()
        arrived = eventually(lambda: len(set(destination.bodies)) == COUNT and states(outbox.engine) == {}, 300)
    finally:
        failpoints.arm(None)
        relay.stop()
        relay.join(60)

    lost, repeated = lost_and_repeated(destination.bodies)
    assert (arrived, lost) == (True, [])
    assert unanswered.issuperset(repeated)
    assert by_key(destination.bodies) == IN_ORDER


@pytest.mark.usefixtures("small_calls")
def test_what_was_not_committed_at_a_stop_comes_after_it(pg_engine):
    """Its ids lie before where the stopped relay came to, and its transaction is none of that window."""
    outbox, first = Outbox(pg_engine), Destination()
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
