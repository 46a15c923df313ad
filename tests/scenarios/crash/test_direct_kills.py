"""Direct send under fire: writers and relays are killed at any moment. Nothing is lost, invented or out of order, and
what comes twice was in the hands of who was killed.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from outbox import Outbox, Relay
from tests.scenarios.exactness import direct_actors
from tests.scenarios.exactness.business import FactRow, facts, set_up
from tests.scenarios.exactness.direct_actors import CallingSender, Task
from tests.scenarios.exactness.history import Delivery, Fault, Findings, HistoryFile, judge
from tests.scenarios.exactness.relays import settings
from tests.scenarios.exactness.runs import Child
from tests.support.directly import without_grace
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

ROWS, KEYS = 100, 20
#: In seconds; no process gets no processor for so long.
PATIENCE = 300.0


@dataclass(frozen=True)
class Killed:
    """A process that is gone, and what it was."""

    pid: int
    writer: bool


class Battle:
    """Processes on one database, and what came of them."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._history = HistoryFile(folder / "history")
        self._writers_so_far = 0
        self.log = folder / "log"
        self.killed: list[Killed] = []
        set_up(engine, KEYS)

    def start(self, *, writes: bool, **more: object) -> Child:
        """Another process."""
        self._writers_so_far += writes
        task = self._task(writer=self._writers_so_far if writes else None, **more)
        return Child(direct_actors, task, self.log)

    def send_what_is_left(self) -> None:
        """Deliver in this process, until nothing is left, as if each grace were over: all writers are gone."""
        without_grace(self._engine)
        sender = CallingSender(self._task())
        Relay(Outbox(self._engine), sender, settings=settings(ROWS, PATIENCE)).until_empty()
        sender.close()

    def _task(self, **more: object) -> Task:
        return Task(
            url=self._engine.url.render_as_string(hide_password=False),
            history=str(self._folder / "history"),
            calls=str(self._folder / "calls"),
            enough=str(self._folder / "enough"),
            rows=ROWS,
            **more,  # type: ignore[arg-type]  # the test knows the names
        )

    def kill(self, process: Child, *, writes: bool) -> None:
        """It does not come back."""
        self._history.append(Fault("kill", process.pid))
        process.end(signal.SIGKILL)
        self.killed.append(Killed(process.pid, writes))

    def enough(self) -> None:
        """Writers end."""
        (self._folder / "enough").touch()

    def committed(self) -> int:
        """How many messages there are."""
        with Session(self._engine) as session:
            return session.scalar(select(func.count()).select_from(FactRow)) or 0

    def complete(self) -> bool:
        """Whether everything came."""
        came = {event.name for event in self._history.read() if isinstance(event, Delivery)}
        return all(fact.name in came for fact in facts(self._engine))

    def findings(self) -> Findings:
        """What is wrong."""
        return judge(facts(self._engine), self._history.read(), batch=ROWS)

    def repeated(self) -> Counter[int]:
        """How many messages came first from each process, and then again from another one or the same."""
        first: dict[str, int] = {}
        again: Counter[int] = Counter()
        for event in self._history.read():
            if isinstance(event, Delivery):
                if event.name in first:
                    again[first[event.name]] += 1
                first.setdefault(event.name, event.relay)
        return again

    def calls(self) -> dict[int, list[int]]:
        """How many messages each call of each process held."""
        by_process: dict[int, list[int]] = {}
        path = self._folder / "calls"
        for line in path.read_text().splitlines() if path.exists() else ():
            pid, number = line.split()
            by_process.setdefault(int(pid), []).append(int(number))
        return by_process

    def excuses(self) -> dict[int, int]:
        """What each killed process may have had in its hands: a call, and of a relay a batch of each of its workers.

        A worker's first batch goes in small calls, of which none is settled before the last.
        """
        calls = self.calls()
        return {
            each.pid: max(calls.get(each.pid, [0])) if each.writer else min(sum(calls.get(each.pid, [])), 2 * ROWS)
            for each in self.killed
        }


# A relay that gets no processor for as long as its lease repeats a batch, although nobody has killed it.
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_writers_and_relays_are_killed_at_any_moment(pg_engine: Engine, tmp_path: Path, full: bool) -> None:
    """Orders of three messages each: 4 writers that send by themselves, 3 relays."""
    orders, kills = (10_000, 200) if full else (500, 8)
    seed = random.randrange(1_000_000)
    chance, battle, began = random.Random(seed), Battle(pg_engine, tmp_path), time.monotonic()
    processes = [(battle.start(writes=n < 4), n < 4) for n in range(7)]
    try:
        for _ in range(kills):
            time.sleep(chance.uniform(0.3, 1.5))
            at = chance.randrange(len(processes))
            process, writes = processes[at]
            battle.kill(process, writes=writes)
            processes[at] = (battle.start(writes=writes), writes)
        assert eventually(lambda: battle.committed() >= 3 * orders, 900)
        battle.enough()
        for process, writes in processes:
            if writes:
                assert eventually(lambda: not process.running)  # noqa: B023 - asked at once
                assert process.end(signal.SIGTERM) == 0, battle.log.read_text()[-3000:]
        complete = eventually(battle.complete)
        time.sleep(12)  # what comes again comes after the grace
    finally:
        for process, _ in processes:
            process.end(signal.SIGKILL)

    findings, repeated, excuses = battle.findings(), battle.repeated(), battle.excuses()
    by_killed = sum(number for pid, number in repeated.items() if pid in excuses)
    print(f"seed {seed}: {battle.committed()} messages, {len(battle.killed)} kills, {findings}")
    print(f"most repeated by one kill: {max(repeated.values(), default=0)}, {time.monotonic() - began:.0f} s")
    assert complete
    assert findings.wrong == {}
    assert {pid: number for pid, number in repeated.items() if number > excuses.get(pid, 0)} == {}, excuses
    assert by_killed == findings.duplicates


POINTS = {
    "direct.before_send": (True, False),
    "direct.after_send": (True, True),
    "direct.after_ack": (True, False),
    "outbox.before_commit": (False, False),
    "outbox.after_commit": (True, False),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_writer_that_dies_at_a_point_of_its_way_loses_nothing(engine: Engine, tmp_path: Path, point: str) -> None:
    """At its first time there. Only who dies between sending and saying so has somebody send again.

    Grace, lease and deadline are so long that nobody sends in the place of a process that only stands still.
    """
    arrives, comes_again = POINTS[point]
    battle = Battle(engine, tmp_path)
    relays = [battle.start(writes=False, lease=PATIENCE) for _ in range(2)]
    writer = battle.start(writes=True, kill_at=point, orders=1000, grace=PATIENCE, deadline=PATIENCE / 3)
    try:
        died = eventually(lambda: not writer.running, PATIENCE)
        code = writer.end(signal.SIGKILL)
        battle.kill(writer, writes=True)
        ended = [relay.end(signal.SIGTERM, PATIENCE) for relay in relays]
    finally:
        for relay in relays:
            relay.end(signal.SIGKILL)
    battle.send_what_is_left()

    findings, repeated = battle.findings(), battle.repeated()
    assert (died, code) == (True, -signal.SIGKILL), battle.log.read_text()[-3000:]
    # A relay that has hardly begun ends by the signal itself.
    assert {0, -signal.SIGTERM}.issuperset(ended), battle.log.read_text()[-3000:]
    assert findings.wrong == {}
    assert battle.committed() >= 3 * arrives
    assert bool(findings.duplicates) == comes_again
    assert findings.duplicates == repeated[writer.pid] <= battle.excuses()[writer.pid]
