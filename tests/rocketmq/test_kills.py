"""Half messages under fire: business processes die at every point of their way, checkers are killed all the time.

What took effect is delivered, once, and nothing else is. The judge is in `fire_judge.py`.
"""

from __future__ import annotations

import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

import outbox
from outbox.model.limits import HALF_TOPIC
from outbox.testing.servers import PostgresServer
from tests.rocketmq import fire_actors
from tests.rocketmq.fire_actors import Task
from tests.rocketmq.fire_business import effects, reading, set_up, undecided
from tests.rocketmq.fire_judge import Findings, Outcome, judge
from tests.rocketmq.fire_plan import HALF_POINTS, Way
from tests.scenarios.exactness import relays
from tests.scenarios.exactness.history import Delivery, HistoryFile
from tests.scenarios.exactness.runs import Child
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

EVERY_WAY: tuple[Way, ...] = ("execute", "listener", "join", "record")
BY_LISTENER: tuple[Way, ...] = ("execute", "listener")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of what; see `Task`."""

    transactions: int
    lanes: int = 8
    ways: tuple[Way, ...] = EVERY_WAY
    slow: float = 0.08
    kill_every: float = 2.0
    #: So many checkers are killed at least.
    kills: int = 4
    naive: bool = False


NORMAL = Plan(transactions=80)
FULL = Plan(transactions=5000, slow=0.04, kill_every=5.0)
#: Transactions that are slow, so that their listener is asked while they are under way; and it is naive. Its checkers
#: live on: who is killed again and again on a busy machine decides nothing.
NAIVE = Plan(transactions=30, ways=BY_LISTENER, slow=1.0, naive=True, kill_every=3600.0, kills=0)


class Battle:
    """Business processes, checkers and a relay on one database, beside a business database without an outbox."""

    def __init__(self, engine: Engine, business: Engine, folder: Path, plan: Plan) -> None:
        self._url, self._business_url = (_url_of(each) for each in (engine, business))
        self._reading, self._reading_business = reading(self._url), reading(self._business_url)
        self._folder, self._plan = folder, plan
        self._history = HistoryFile(folder / "history")
        self._log = folder / "log"
        self.seed = random.randrange(1_000_000)
        (folder / "asked").mkdir()
        set_up(engine, business)

    def perform(self) -> Findings:
        """Let all transactions happen, let checkers settle them, and judge."""
        began = time.monotonic()
        checkers, relay, writers = self._start("checkers"), self._relay(), self._start("writers")
        try:
            assert eventually(lambda: not writers.running, 2400), self._words()
            assert writers.end(signal.SIGTERM) == 0, self._words()
            assert eventually(lambda: self.events()["checker"] >= self._plan.kills, 120), self._words()
            (self._folder / "enough").touch()
            settled = eventually(lambda: not undecided(self._reading) or not checkers.running, 600)
            assert settled, f"{undecided(self._reading)} half messages are not settled: {self._words()}"
            assert checkers.running, self._words()
            checkers.end(signal.SIGKILL)
            eventually(lambda: not self._released() - self._delivered(), 120)
            assert relay.end(signal.SIGTERM) == 0, self._words()
        finally:
            for child in (writers, checkers, relay):
                child.end(signal.SIGKILL)
        findings = judge(self.outcome())
        print(f"seed {self.seed}: {self}; {findings}; {time.monotonic() - began:.0f} s")
        return findings

    def outcome(self) -> Outcome:
        """What is left in the databases, and what came."""
        halves: dict[str, set[str]] = {}
        for transaction, body in self._rows(f"SELECT key, body FROM outbox_message WHERE topic = '{HALF_TOPIC}'"):
            halves.setdefault(transaction, set()).add(bytes(body).decode())
        return Outcome(
            halves=halves,
            effects=effects(self._reading, self._reading_business),
            verdicts=dict(self._rows("SELECT transaction_id, op FROM outbox_op")),
            released=self._released(),
            delivered=self._delivered(),
        )

    def events(self) -> Counter[str]:
        """How many processes were killed at each point; "checker": how many checkers, at any moment; "fenced": how many
        business transactions came too late.
        """
        path = self._folder / "events"
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def verdicts(self) -> Counter[tuple[str, str]]:
        """How many verdicts there are, by who brought them."""
        rows = self._rows("SELECT decided_by, op, count(*) FROM outbox_op GROUP BY decided_by, op")
        return Counter({(by.split()[0], op): number for by, op, number in rows})

    def __str__(self) -> str:
        verdicts = {f"{by} {op}": number for (by, op), number in sorted(self.verdicts().items())}
        return f"events {dict(sorted(self.events().items()))}, verdicts {verdicts}"

    def _start(self, role: str) -> Child:
        plan = self._plan
        task = Task(
            url=self._url,
            business=self._business_url,
            folder=str(self._folder),
            role=role,
            seed=self.seed,
            transactions=plan.transactions,
            lanes=plan.lanes,
            ways=plan.ways,
            slow=plan.slow,
            naive=plan.naive,
            kill_every=plan.kill_every,
        )
        return Child(fire_actors, task, self._log)

    def _relay(self) -> Child:
        task = relays.Task(url=self._url, history=str(self._folder / "history"), rows=100, lease=2.0)
        return Child(relays, task, self._log)

    def _released(self) -> Counter[str]:
        rows = self._rows(f"SELECT body FROM outbox_message WHERE topic <> '{HALF_TOPIC}'")
        return Counter(bytes(body).decode() for (body,) in rows)

    def _delivered(self) -> Counter[str]:
        return Counter(event.name for event in self._history.read() if isinstance(event, Delivery))

    def _rows(self, question: str) -> list[tuple[Any, ...]]:
        with self._reading.connect() as connection:
            return [tuple(row) for row in connection.execute(text(question))]

    def _words(self) -> str:
        return f"seed {self.seed}: {self._log.read_text()[-3000:]}"


def _url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


@pytest.fixture
def business(engine: Engine, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A business database without an outbox, beside that of `engine` and of its kind."""
    if engine.dialect.name == "sqlite":
        yield outbox.create_engine(f"sqlite:///{tmp_path}/business.sqlite3")
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"business_{uuid.uuid4().hex}"
    made = outbox.create_engine(server.create_database(name))
    yield made
    made.dispose()
    server.drop_database(name)


@pytest.mark.timeout(3600)
def test_what_took_effect_is_delivered_once_and_nothing_else(
    engine: Engine, business: Engine, tmp_path: Path, full: bool
) -> None:
    """On every way to a verdict 30 % of those die that get to a half point, and two checkers again and again."""
    plan = FULL if full else NORMAL
    battle = Battle(engine, business, tmp_path, plan)

    findings = battle.perform()

    events, verdicts = battle.events(), battle.verdicts()
    assert findings.wrong == {}, f"seed {battle.seed}"
    assert min(events[point] for point in HALF_POINTS) >= max(1, plan.transactions // 100), "it was too easy"
    assert sum(events[point] for point in HALF_POINTS) >= plan.transactions * 0.3, "it was too easy"
    assert events["fenced"] >= plan.transactions // 500
    assert {("producer", "commit"), ("check", "commit"), ("check", "rollback")} <= set(verdicts)


@pytest.mark.timeout(900)
def test_a_listener_that_takes_no_row_for_a_rollback_is_caught(
    engine: Engine, business: Engine, tmp_path: Path
) -> None:
    """It does not keep the business from committing before it says that it has not."""
    battle = Battle(engine, business, tmp_path, NAIVE)

    findings = battle.perform()

    assert set(findings.wrong) == {"contradictions", "lost"}


GOOD = Outcome(
    halves={"a": {"1", "2"}, "b": {"3"}},
    effects={"a": 2},
    verdicts={"a": "commit", "b": "rollback"},
    released=Counter("12"),
    delivered=Counter("12"),
)


@pytest.mark.parametrize(
    ("outcome", "found"),
    [
        (GOOD, {}),
        (replace(GOOD, verdicts={"a": "rollback", "b": "rollback"}), {"contradictions": ["a"]}),
        (replace(GOOD, verdicts={"a": "commit", "b": "commit"}), {"contradictions": ["b"]}),
        (replace(GOOD, verdicts={"a": "commit"}), {"undecided": ["b"]}),
        (replace(GOOD, delivered=Counter("1")), {"lost": ["2"]}),
        (replace(GOOD, effects={"a": 3}), {"lost": ["half messages of a"]}),
        (replace(GOOD, delivered=Counter("123")), {"phantom": ["3"]}),
        (replace(GOOD, released=Counter("123")), {"phantom": ["3"]}),
        (replace(GOOD, delivered=Counter("112")), {"twice": ["1"]}),
        (replace(GOOD, released=Counter("112")), {"twice": ["1"]}),
    ],
)
def test_the_judge_finds(outcome: Outcome, found: dict[str, list[str]]) -> None:
    assert judge(outcome).wrong == found
