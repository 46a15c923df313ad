"""A storm: consumers of one group that are killed, stopped and frozen while writers write; judged at the end."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sqlalchemy import Engine, NullPool, create_engine, text

from outbox import Outbox
from tests.scenarios.consuming import consumers
from tests.scenarios.consuming.journal import Entry, Journal, judge
from tests.scenarios.exactness.business import change, facts, set_up
from tests.scenarios.exactness.runs import Child

Trouble = Literal["kill", "stop", "freeze"]

#: Only behind a dead letter a message waits for a person; behind any other head its turn is still to come.
_PARKED = """
    SELECT body, CASE WHEN state IS NOT NULL THEN state WHEN EXISTS (
        SELECT 1 FROM outbox_parked AS h WHERE h.subscription = p.subscription AND h.unit = p.unit AND h.state = 'dead'
    ) THEN 'behind' ELSE 'in turn' END
    FROM outbox_parked AS p WHERE subscription = 'billing'
"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of what. `least`: messages, if `seconds` are not enough. `crowd`: how many consumers there are at first,
    and after each trouble: some join, or some are told to stop. `fails`, `hangs`: shares of the calls. `every`: seconds
    between two troubles.
    """

    seconds: float
    least: int
    crowd: tuple[int, ...] = (4, 1, 10, 2)
    partitions: int = 16
    keys: int = 300
    writers: int = 3
    a_second: int = 60
    fails: float = 0.05
    hangs: float = 0.003
    trouble: tuple[Trouble, ...] = ("kill", "kill", "stop")
    every: float = 3.0
    #: A process reads so many messages of a partition at once, and a fault excuses as many copies.
    rows: int = 50
    #: Longer than a process on a busy machine gets no turn.
    lease: float = 5.0
    inbox: bool = False
    twin: str | None = None
    #: How long nothing may come before what is missing counts as lost.
    patience: float = 120.0


class TakenBack(Exception):  # noqa: N818 - it rolls a transaction back
    """A business transaction that changes its mind."""


@dataclass(kw_only=True)
class Report:
    """What came of a storm."""

    wrong: dict[str, list[str]]
    messages: int
    calls: Counter[str]
    parked: Counter[str]
    faults: list[str] = field(default_factory=list)
    #: Messages whose effect is there more than once, or not at all; with an inbox only.
    effects: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        wrong = {kind: (len(texts), texts[:3]) for kind, texts in self.wrong.items()}
        return f"{self.messages} messages, {dict(self.calls)}, {dict(self.parked)}, {Counter(self.faults)}, {wrong}"


class Storm:
    """One storm on one database."""

    def __init__(self, engine: Engine, folder: Path, plan: Plan, seed: int) -> None:
        self._engine = engine
        self._plan = plan
        self._random = random.Random(seed)
        self._path, self.log = folder / "journal", folder / "processes.log"
        self._journal = Journal(self._path)
        #: On SQLite its transactions wait for no writer, which those of an outbox's engine do.
        self._reading = create_engine(engine.url, poolclass=NullPool)
        self._consumers: list[Child] = []
        self._wanted = plan.crowd[0]
        self._faults: list[str] = []
        self._over = threading.Event()
        #: About so many messages; writers that count at the same moment may miss some.
        self._committed = 0

    def perform(self) -> Report:
        """Let it happen, wait until everything is handled or parked, and judge."""
        set_up(self._engine, self._plan.keys)
        with self._engine.begin() as connection:
            connection.execute(text("CREATE TABLE effect (name text NOT NULL)"))
        writers = [threading.Thread(target=self._write, args=(number,)) for number in range(self._plan.writers)]
        try:
            self._fill()
            for writer in writers:
                writer.start()
            self._make_trouble(writers)
            self._wait_until_all_came()
        finally:
            self._over.set()
            self._committed = self._plan.least
            for consumer in self._consumers:
                consumer.send_signal(signal.SIGCONT)
                consumer.end(signal.SIGKILL)
        return self._report()

    def _consumer(self) -> Child:
        plan = self._plan
        task = consumers.Task(
            url=self._engine.url.render_as_string(hide_password=False),
            journal=str(self._path),
            seed=self._random.randrange(1_000_000),
            inbox=plan.inbox,
            partitions=plan.partitions,
            concurrency=2,
            rows=plan.rows,
            lease=plan.lease,
            fails=plan.fails,
            hangs=plan.hangs,
            twin=plan.twin,
        )
        return Child(consumers, task, self.log)

    def _write(self, number: int) -> None:
        """Commit changes of a few objects at once, in the order of their keys; take one transaction of ten back."""
        outbox, chance, count = Outbox(self._engine), random.Random(number), 0
        while not self._over.is_set() or self._committed < self._plan.least:
            keys = sorted({f"k{chance.randrange(self._plan.keys)}" for _ in range(chance.randint(1, 3))})
            with suppress(TakenBack), outbox.begin() as session:
                for key in keys:
                    count += 1
                    change(outbox, session, key, f"{number}-{count}")
                if chance.random() < 0.1:
                    raise TakenBack
                self._committed += len(keys)
            self._over.wait(chance.uniform(0, 4) * self._plan.writers / self._plan.a_second)

    def _make_trouble(self, writers: Sequence[threading.Thread]) -> None:
        """One after the other while the writers write; they stop when the time is over."""
        until, number = time.monotonic() + self._plan.seconds, 0
        while any(writer.is_alive() for writer in writers):
            if time.monotonic() >= until:
                self._over.set()
            time.sleep(self._plan.every * self._random.uniform(0.7, 1.3))
            kind = self._plan.trouble[number % len(self._plan.trouble)]
            self._faults.append(kind)
            if kind == "freeze":
                self._freeze(self._random.sample(self._consumers, len(self._consumers) // 2))
            else:
                self._end(kind, [self._random.choice(self._consumers)])
            self._wanted = self._plan.crowd[(number + 1) % len(self._plan.crowd)]
            self._end("stop", self._random.sample(self._consumers, max(0, len(self._consumers) - self._wanted)))
            self._fill()
            number += 1

    def _freeze(self, victims: Sequence[Child]) -> None:
        """Let processes stand still for longer than their leases."""
        for victim in victims:
            self._journal.write(Entry("fault", victim.pid))
            victim.send_signal(signal.SIGSTOP)
        time.sleep(2 * self._plan.lease)
        for victim in victims:
            victim.send_signal(signal.SIGCONT)

    def _end(self, kind: Trouble, victims: Sequence[Child]) -> None:
        """Kill processes, or tell them to stop: then they finish their calls, and hand their partitions over."""
        for victim in victims:
            self._journal.write(Entry("fault", victim.pid))
            if kind == "stop":
                victim.terminate()
        for victim in victims:
            if kind == "stop":
                with suppress(subprocess.TimeoutExpired):
                    victim.wait(60)
            victim.kill()
            victim.wait()

    def _fill(self) -> None:
        """Start processes until there are as many as wanted; some have ended, as one does whose calls hang."""
        for ended in [each for each in self._consumers if not each.running]:
            self._journal.write(Entry("fault", ended.pid))
            self._consumers.remove(ended)
        self._consumers += [self._consumer() for _ in range(self._wanted - len(self._consumers))]

    def _parked(self) -> dict[str, str]:
        """Return the state of each parked message; `behind` a dead letter, or `in turn` behind another head."""
        with self._reading.connect() as connection:
            return {bytes(body).decode(): state for body, state in connection.execute(text(_PARKED))}

    def _effects(self) -> Counter[str]:
        with self._reading.connect() as connection:
            return Counter(connection.scalars(text("SELECT name FROM effect")))

    def _done(self) -> Collection[str]:
        """Return what was handled: by what is committed where there is an inbox, because `done` is noted before."""
        if self._plan.inbox:
            return self._effects()
        return {entry.name for entry in self._journal.read() if entry.what == "done"}

    def _missing(self) -> int:
        done, parked = self._done(), self._parked()
        there = sum(state not in ("dead", "behind") for state in parked.values())
        return there + sum(fact.name not in done and fact.name not in parked for fact in facts(self._reading))

    def _wait_until_all_came(self) -> None:
        """Until everything is handled or waits for a person, or nothing has moved for long."""
        last, since = -1, time.monotonic()
        while (missing := self._missing()) and time.monotonic() - since < self._plan.patience:
            if missing != last:
                last, since = missing, time.monotonic()
            self._fill()
            time.sleep(0.3)

    def _excess(self, entries: Sequence[Entry]) -> dict[str, list[str]]:
        """Return the copies, if there are more than the faults excuse."""
        plan, done = self._plan, [entry.name for entry in entries if entry.what == "done"]
        # While another one is away, a process has more partitions than its share.
        owned = min(plan.partitions, 2 * -(-plan.partitions // min(plan.crowd)))
        excused = plan.rows * owned * sum(entry.what in ("fault", "lost", "hang") for entry in entries)
        copies = len(done) - len(set(done))
        return {"excess": [f"{copies} copies, and the faults excuse {excused}"]} if copies > excused else {}

    def _report(self) -> Report:
        committed, entries, parked = facts(self._reading), self._journal.read(), self._parked()
        effects = self._effects()
        # A message that is parked otherwise was handled, and the process was killed before it could note that.
        waits = {name for name, state in parked.items() if state in ("dead", "behind")}
        handled = {fact.name for fact in committed} - waits
        wrong_effects = [name for name in {*effects, *handled} if effects[name] != (name in handled)]
        return Report(
            wrong=judge(committed, entries, parked) | self._excess(entries),
            messages=len(committed),
            calls=Counter(entry.what for entry in entries),
            parked=Counter(parked.values()),
            faults=self._faults,
            effects=sorted(wrong_effects) if self._plan.inbox else [],
        )
