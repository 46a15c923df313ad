"""Several calls of a batch side by side: the keys keep their order, and a crash repeats one batch at most."""

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
from sqlalchemy import Engine
from tenacity import wait_fixed

from outbox import Message, Outbox, Retry, RetryPolicy, Verdict
from outbox.model.verdict import DONE
from outbox.runtime import failpoints
from outbox.store.log.cursor import Batch
from outbox.store.log.log import Limits
from outbox.worker.calls import Call, Caller, Handler
from outbox.worker.choosing import Chooser
from outbox.worker.outcome import Outcome, Pending
from outbox.worker.partition import PartitionWorker
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings
from tests.support.destination import LONG_LEASE
from tests.support.leases import end_lease
from tests.support.parked import states
from tests.support.readers import Worker, at_work, declared, job
from tests.support.waiting import eventually

ROWS = 8
SETTINGS = Settings(lease=LONG_LEASE, limits=Limits(rows=ROWS))
CHOOSE = Chooser.next
POLICY = HandlerPolicy(deadline=timedelta(minutes=5), retry=RetryPolicy(attempts=1_000_000, wait=wait_fixed(0)))


def side_by_side(engine: Engine, handler: Handler, calls: int = 2) -> Worker:
    """A worker that makes so many calls at once."""
    only = job(declared(), handler, caller=Caller(calls), policy=POLICY)
    return Worker(Outbox(engine).database, [only], SETTINGS)


class Killed(BaseException):
    """The worker has no time to do anything else."""


class Destination:
    """Takes messages after a while, refuses some, fails at some; checks what arrives, over all workers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.present: Counter[str | None] = Counter()
        #: By key, the number that arrived last; and the numbers that were done.
        self.last: dict[str | None, int] = defaultdict(lambda: -1)
        self.done: set[str] = set()
        #: How many messages came again that were done, since the last kill.
        self.repeated: set[str] = set()
        self.wrong: list[str] = []

    def __call__(self, messages: Sequence[Message]) -> list[Verdict]:
        """Nothing of a key is done behind the first that is not."""
        keys = {message.key for message in messages if message.key is not None}
        with self.lock:
            self.wrong += [f"two calls with key {key}" for key in keys if self.present[key]]
            self.present.update(keys)
            seconds, fails_at = self.random.choice([0, 0, 0.001, 0.01]), self.random.randrange(60)
        time.sleep(seconds)
        with self.lock:
            self.present.subtract(keys)
            return self._take(messages, fails_at)

    def _take(self, messages: Sequence[Message], fails_at: int) -> list[Verdict]:
        verdicts: list[Verdict] = []
        stopped: set[str | None] = set()
        for index, message in enumerate(messages):
            if index == fails_at:
                raise ConnectionError("lost")
            if message.key in stopped or self.random.random() < 0.01:
                verdicts.append(Retry("not now"))
                stopped |= {message.key} - {None}
                continue
            self._arrive(message)
            verdicts.append(DONE)
        self.done |= {
            message.body.decode() for message, verdict in zip(messages, verdicts, strict=True) if verdict is DONE
        }
        return verdicts

    def _arrive(self, message: Message) -> None:
        text = message.body.decode()
        number = int(text.partition("-")[2])
        if text in self.done:
            self.repeated.add(text)
        if message.key is not None:
            if number > self.last[message.key] + 1:
                self.wrong.append(f"{text} after {self.last[message.key]}")
            self.last[message.key] = number


def fill(engine: Engine, keys: dict[str | None, int], seed: int) -> set[str]:
    """Write messages, numbered within each key; return their bodies."""
    rest, shuffled = Counter(keys), [key for key, count in keys.items() for _ in range(count)]
    random.Random(seed).shuffle(shuffled)
    numbers: Counter[str | None] = Counter()
    messages = []
    for key in shuffled:
        messages.append(Message("orders", f"{key}-{numbers[key]}", key=key))
        numbers[key] += 1
    with Outbox(engine).begin() as session:
        Outbox(engine).send_all(session, messages)
    assert rest == numbers
    return {message.body.decode() for message in messages}


@contextmanager
def killed_at(settle: int, point: str) -> Iterator[None]:
    """Kill the worker at a settle; a call may be under way."""
    left = [settle]

    def reached(name: str) -> None:
        left[0] -= name == point
        if name == point and left[0] == 0:
            raise Killed

    failpoints.arm(reached)
    try:
        yield
    finally:
        failpoints.arm(None)


KEYS: dict[str | None, int] = {"a": 60, "b": 40, "c": 20, "d": 20, "e": 10, None: 50}


def storm(engine: Engine, seed: int, turns: int = 6) -> None:
    """Kill or stop one worker after the other; the last one finishes. Check all that arrived."""
    destination, bodies = Destination(seed), fill(engine, KEYS, seed)

    def nothing_is_left() -> bool:
        """A worker ends although messages wait for another try."""
        side_by_side(engine, destination, calls=3).until_empty()
        return states(engine) == {}

    for turn in range(turns):
        if turn % 3 == 2:
            stopped_meanwhile(engine, destination)
            continue
        point = f"worker.{'before' if turn % 2 else 'after'}_settle"
        with killed_at(4 + destination.random.randrange(8), point), suppress(Killed):
            side_by_side(engine, destination, calls=3).until_empty()
        # A kill repeats a batch at most; and what a call has in its hands arrives meanwhile.
        assert len(destination.repeated) <= ROWS
        assert eventually(lambda: not +destination.present, 120)
        end_lease(engine)
        destination.repeated.clear()
    assert eventually(nothing_is_left, 120)

    assert len(destination.repeated) <= ROWS
    assert destination.wrong == []
    assert destination.done == bodies
    assert {key: last + 1 for key, last in destination.last.items()} == {key: n for key, n in KEYS.items() if key}


def stopped_meanwhile(engine: Engine, destination: Destination) -> None:
    """Let a worker handle some messages, and stop it."""
    had = len(destination.done)
    with at_work(side_by_side(engine, destination, calls=3)):
        eventually(lambda: len(destination.done) > had + 20, 1)


def test_a_stop_repeats_nothing(engine):
    destination, bodies = Destination(0), fill(engine, KEYS, 0)
    while destination.done < bodies:
        stopped_meanwhile(engine, destination)

    assert destination.repeated == set()
    assert destination.wrong == []


@pytest.mark.smoke("workers are stopped and killed over and over")
@pytest.mark.parametrize("seed", range(3))
def test_keys_keep_their_order_and_nothing_is_lost_whatever_fails_and_whoever_is_killed(engine, seed):
    storm(engine, seed)


def too_far(self: PartitionWorker, _next: Message, batch: Batch) -> None:
    """Settle messages that have no outcome yet."""
    self._store(batch.end, self._outcome)
    self._outcome = Outcome()


def careless(self: Chooser, batch: Pending, under_way: Sequence[Call]) -> list[Message]:
    """Hand over a message beside a call that has its key."""
    begun = {message.id for call in under_way for message in call.messages}
    idle = len(under_way) < self._caller.concurrency
    return CHOOSE(self, batch, under_way) or [m for m in batch.messages if idle and m.id not in begun][:1]


@pytest.mark.storm
@pytest.mark.parametrize(
    ("part", "name", "broken"),
    [(PartitionWorker, "_settle_before", too_far), (Chooser, "next", careless)],
)
def test_the_storm_finds_a_worker_that_is_broken(sqlite_engine, monkeypatch, part, name, broken):
    monkeypatch.setattr(part, name, broken)

    with pytest.raises(AssertionError):
        for seed in range(50):
            storm(sqlite_engine, seed)
