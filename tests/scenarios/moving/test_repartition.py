"""The number of partitions changes while writers write, and relays are killed: 1, 4, 2, 3."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox.admin.repartition import repartition
from outbox.errors import SubscriptionError
from outbox.model.barrier import stop_at
from outbox.model.position import Progress
from outbox.model.subscription import Declaration
from outbox.store.database import Channel, Database
from outbox.store.subscriptions.generations import Generations
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.scenarios.moving.arrivals import Arrival, arrivals, arrived, faults
from tests.scenarios.moving.relaying import SETTINGS
from tests.scenarios.moving.writers import Writers, many
from tests.support.supervised import Supervised, supervised
from tests.support.waiting import eventually

DESTINATION = "test://orders"
NUMBERS = (4, 2, 3)


def faults_of_kills(written: Iterable[tuple[str, int]], found: Sequence[Arrival], kills: int) -> dict[str, int]:
    """What is wrong with what arrived, if relays were killed: each may repeat a batch of every partition.

    A repetition begins with an earlier message of its key, and goes on in order from there.
    """
    wrong = {name: number for name, number in faults(written, found, []).items() if name in ("lost", "phantom")}
    last: dict[str, int] = defaultdict(lambda: -1)
    passed_over = 0
    for each in found:
        passed_over += each.number > last[each.key] + 1
        last[each.key] = each.number
    ends = Counter({key: number for key, number in last.items() if (key, number + 1) in set(written)})
    repeated = len(found) - len({(each.key, each.number) for each in found})
    wrong |= {
        "passed over": passed_over,
        "ends with an earlier one": len(ends),
        "repeated too often": max(0, repeated - kills * max(NUMBERS) * SETTINGS.limits.rows),
    }
    return {name: number for name, number in wrong.items() if number}


class Killer:
    """Kills relays by chance, as long as it is asked to."""

    def __init__(self, relays: Sequence[Supervised], pause: float) -> None:
        self.kills = 0
        self._relays, self._pause = relays, pause
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._kill)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Kill meanwhile."""
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._thread.join()

    def _kill(self) -> None:
        while not self._stopping.wait(random.uniform(0.5, 1.5) * self._pause):
            random.choice(self._relays).send(signal.SIGKILL)
            self.kills += 1


@dataclass
class Load:
    """Relays and writers, and a number of partitions that changes in between."""

    engine: Engine
    folder: Path
    least: int
    seconds: float

    def perform(self, *, relays: int, pause: float | None) -> tuple[list[tuple[str, int]], list[Arrival], int]:
        """Return what was written, what arrived, and how many relays were killed. `pause`: between two kills."""
        path = self.folder / "arrived"
        url = self.engine.url.render_as_string(hide_password=False)
        program = ["-m", "tests.scenarios.moving.relaying", url, str(path), DESTINATION]
        sqlite = self.engine.dialect.name == "sqlite"
        with ExitStack() as running:
            channel = running.enter_context(closing(Database(self.engine).open()))
            Subscriptions(channel).declare(Declaration(name="relay", destination=DESTINATION))
            writers = running.enter_context(
                Writers(self.engine, 2 if sqlite else 4, keys=5, pause=0.04 if sqlite else 0.02)
            )
            found = running.enter_context(supervised([program] * relays, self.folder))
            killer = Killer(found, pause or 0.0)
            assert eventually(lambda: arrived(path), self.seconds)
            with killer.at_work() if pause else ExitStack():
                for number in NUMBERS:
                    self._change(channel, number)
                    more = arrived(path) + self.least
                    assert eventually(lambda more=more: arrived(path) > more, self.seconds)  # type: ignore[misc]
            written = writers.stop()
            wanted = set(written)
            eventually(lambda: wanted <= {(each.key, each.number) for each in arrivals(path)}, self.seconds)
        return written, arrivals(path), killer.kills

    def _change(self, channel: Channel, number: int) -> None:
        """As an operator does who tries again."""
        subscriptions = Subscriptions(channel)

        def changed() -> bool:
            stored = subscriptions.get("relay")
            if (stored.partitions, stored.next_partitions) == (number, None):
                return True
            try:
                repartition(channel, "relay", number, wait=timedelta(seconds=20))
            except SubscriptionError:
                pass
            return False

        assert eventually(changed, self.seconds)


@pytest.fixture
def load(engine: Engine, tmp_path: Path, full: bool) -> Load:
    """One on a database of its own."""
    return Load(engine, tmp_path, least=many(engine, full=full), seconds=900 if full else 300)


@pytest.mark.parametrize(
    ("engine", "relays"),
    [
        pytest.param("postgresql", 1, marks=pytest.mark.smoke("three changes under load")),
        pytest.param("postgresql", 3, marks=pytest.mark.storm),
        pytest.param("sqlite", 1, marks=pytest.mark.storm),
        pytest.param("sqlite", 3, marks=pytest.mark.storm),
    ],
    indirect=["engine"],
)
def test_nothing_is_lost_repeated_or_overtaken(load, relays):
    written, found, _ = load.perform(relays=relays, pause=None)

    assert faults(written, found, []) == {}


@pytest.mark.storm
def test_relays_that_are_killed_repeat_a_batch_at_most(load):
    written, found, kills = load.perform(relays=4, pause=2.0)

    assert (faults_of_kills(written, found, kills), kills > 0) == ({}, True)


class AtOnce(Generations):
    """A broken twin: the next generation begins at once, where the foremost of the partitions stands."""

    def order(self, subscription, partitions):
        """As if the others had handled as much."""
        standing = self._progress.standing(subscription)
        self._begin_next(subscription, partitions, Progress(stop_at(standing)))


@pytest.mark.storm
@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_a_change_without_a_meeting_point_is_found_out(load, monkeypatch):
    monkeypatch.setattr("outbox.store.subscriptions.subscriptions.Generations", AtOnce)
    load.least, load.seconds = 200, 10

    written, found, _ = load.perform(relays=2, pause=None)

    assert "lost" in faults(written, found, [])


A, B, C = Arrival(1, "k", 0), Arrival(2, "k", 1), Arrival(3, "k", 2)


@pytest.mark.parametrize(
    ("found", "kills", "wrong"),
    [
        ([A, B, C], 0, {}),
        ([A, B, A, B, C], 1, {}),
        ([A, B, A, B, C], 0, {"repeated too often": 2}),
        ([A, C, B, C], 1, {"passed over": 1}),
        ([A, B, C, A], 1, {"ends with an earlier one": 1}),
        ([A, B], 1, {"lost": 1, "ends with an earlier one": 1}),
    ],
)
def test_the_judge_tells_what_is_wrong(found, kills, wrong):
    assert faults_of_kills([("k", 0), ("k", 1), ("k", 2)], found, kills) == wrong
