"""A run against one destination: writers, two relays and the destination's server, with kills of each; then the judge.

The judge compares what was committed with what a consumer of the destination reads.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sqlalchemy import Engine

from outbox.model.message import Message
from outbox.store.database import Database
from outbox.store.operations.status import statuses
from tests.scenarios.destinations import consumers, relays
from tests.scenarios.exactness import writers
from tests.scenarios.exactness.business import facts, set_up
from tests.scenarios.exactness.history import Delivery, Event, Fault, Findings, delivery_of, judge
from tests.scenarios.exactness.runs import Child, Logged
from tests.support.durable_destinations import KINDS, TOPIC, DurableDestination
from tests.support.effects import billing, effects
from tests.support.waiting import eventually

#: A relay is killed; or when it has sent a batch and not settled it; or the server; or the server, and a relay before
#: it is back.
Trouble = Literal["kill", "worst", "crash", "blackout"]

#: Seconds for each thing that is waited for, on a machine that is busy with other things, too.
_PATIENCE = 600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of what. `quota` messages are committed by each writer, and more until all trouble is over."""

    writers: int = 4
    quota: int
    keys: int
    relays: int = 2
    batch: int
    lease: float = 2.0
    #: Relays begin when so many messages wait for them.
    backlog: int = 100
    trouble: tuple[Trouble, ...]
    #: Relays are killed until the writers have written their quota.
    until_written: bool = False
    pauses: tuple[float, float] = (0.3, 1.0)
    twin: str | None = None


@dataclass(kw_only=True)
class Report:
    """What came of a run."""

    kind: str
    findings: Findings
    messages: int
    copies: int
    faults: list[Trouble] = field(default_factory=list)
    seconds: float = 0.0
    #: What took effect that should not have, or not, or twice, in the consumer behind it.
    wrong_effects: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = {kind: self.faults.count(kind) for kind in sorted(set(self.faults))}
        effects = f"wrong effects {len(self.wrong_effects)}"
        return f"{self.kind}: {self.messages} messages, {self.findings}, {effects}, {kinds}, {self.seconds:.0f} s"


class Run:
    """One run."""

    def __init__(self, kind: str, engine: Engine, billing_engine: Engine, folder: Path, plan: Plan, seed: int) -> None:
        self._kind, self._engine, self._billing, self._folder, self._plan = kind, engine, billing_engine, folder, plan
        self._url = engine.url.render_as_string(hide_password=False)
        self._seed, self._random = seed, random.Random(seed)
        self._enough = folder / "enough"
        self._there: DurableDestination
        self._relays: list[_Relay] = []
        self._writers: list[Child] = []
        self._faults: list[Trouble] = []

    def perform(self) -> Report:
        """Let everything happen, wait until all is sent, and judge."""
        began = time.monotonic()
        set_up(self._engine, self._plan.keys)
        self._there = KINDS[self._kind]()
        try:
            with self._there.server:
                return self._perform(began)
        finally:
            for program in (*self._writers, *self._relays):
                program.end(signal.SIGKILL)

    def _perform(self, began: float) -> Report:
        self._writers = [self._writer(number) for number in range(self._plan.writers)]
        assert eventually(lambda: self._written >= self._plan.backlog, _PATIENCE), self._said()
        self._relays = [self._relay() for _ in range(self._plan.relays)]
        assert eventually(lambda: len(self._read()) >= self._plan.backlog / 2, _PATIENCE), self._said()
        before = self._read()
        self._make_trouble()
        self._end_writers()
        assert eventually(self._all_sent, _PATIENCE), self._said()
        for relay in self._relays:
            # One that has only just been started knows no signals yet.
            assert relay.end(signal.SIGTERM, _PATIENCE) in (0, -signal.SIGTERM), self._said()
        after = self._read()
        committed = facts(self._engine)
        findings = judge(committed, self._history(before, after), batch=self._plan.batch)
        # A consumer cannot handle what is lost; the findings say more than its failure.
        is_right = self._plan.twin is None and not findings.wrong
        return Report(
            kind=self._kind,
            findings=findings,
            messages=len(committed),
            copies=len(after),
            faults=self._faults,
            wrong_effects=self._consume([fact.name for fact in committed]) if is_right else {},
            seconds=time.monotonic() - began,
        )

    def _make_trouble(self) -> None:
        for trouble in self._plan.trouble:
            self._rest()
            self._make(trouble)
        while self._plan.until_written and self._written < self._plan.quota * self._plan.writers:
            self._rest()
            self._make(self._random.choice(("kill", "worst")))

    def _make(self, trouble: Trouble) -> None:
        if trouble in ("crash", "blackout"):
            self._crash(trouble)
        else:
            self._kill(relays.WORST if trouble == "worst" else signal.SIGKILL)
        self._faults.append(trouble)

    def _rest(self) -> None:
        time.sleep(self._random.uniform(*self._plan.pauses))

    def _kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the relay that works, and start another in its place."""
        assert eventually(lambda: any(relay.works for relay in self._relays), _PATIENCE), self._said()
        killed = next(relay for relay in self._relays if relay.works)
        assert killed.end(number) == -signal.SIGKILL, self._said()
        self._relays.remove(killed)
        self._relays.append(self._relay())

    def _crash(self, trouble: Trouble) -> None:
        """Kill the server, and start it again on its data and its port."""
        self._there.server.kill()
        time.sleep(self._random.uniform(0.5, 1.0))
        if trouble == "blackout":
            self._kill()
        self._there.server.start()

    def _end_writers(self) -> None:
        self._enough.touch()
        assert eventually(lambda: not any(writer.running for writer in self._writers), _PATIENCE), self._said()
        assert [writer.end(signal.SIGCONT) for writer in self._writers] == [0] * len(self._writers), self._said()

    def _all_sent(self) -> bool:
        channel = Database(self._engine).open()
        try:
            _, found = statuses(channel)
        finally:
            channel.close()
        return not any(number for each in found for number in (each.backlog, *each.parked.values()))

    @property
    def _written(self) -> int:
        return len(facts(self._engine))

    def _read(self) -> list[Message]:
        return self._there.read(self._there.source)

    def _history(self, before: Iterable[Message], after: Iterable[Message]) -> Iterable[Event]:
        """What was there before the first trouble, all of the trouble, and what came then."""
        yield from (early := [delivery_of(message) for message in before])
        for trouble in self._faults:
            yield from [Fault()] * (2 if trouble == "blackout" else 1)
        left = Counter(delivery.name for delivery in early)
        for message in after:
            delivery: Delivery = delivery_of(message)
            if left[delivery.name]:
                left[delivery.name] -= 1
            else:
                yield delivery

    def _consume(self, expected: list[str]) -> dict[str, int]:
        """Have a consumer handle all of it; it is killed when it has handled half. Returns what is wrong."""
        billing(self._billing)
        database = self._billing.url.render_as_string(hide_password=False)
        task = consumers.Task(kind=self._kind, source=self._there.source, database=database)
        log = self._folder / "consumer.log"
        killed = Child(consumers, task, log)
        half = len(expected) // 2
        assert eventually(lambda: len(effects(self._billing)) >= half or not killed.running, _PATIENCE)
        assert killed.end(signal.SIGKILL) == -signal.SIGKILL, log.read_text()[-3000:]
        second = Child(consumers, task, log)
        assert eventually(lambda: not second.running, _PATIENCE)
        assert second.end(signal.SIGCONT) == 0, log.read_text()[-3000:]
        found = Counter(effects(self._billing))
        found.subtract(expected)
        return {what: number for what, number in found.items() if number}

    def _writer(self, number: int) -> Child:
        task = writers.Task(
            url=self._url,
            number=number,
            quota=self._plan.quota,
            enough=str(self._enough),
            keys=self._plan.keys,
            seed=self._seed * 1000 + number,
            long=2,
            seconds=0.5,
            topics=(TOPIC,),
        )
        return Child(writers, task, self._folder / "writers.log")

    def _relay(self) -> _Relay:
        log = self._folder / f"relay-{len(list(self._folder.glob('relay-*')))}.log"
        routes = self._folder / "routes.toml"
        routes.write_text(f'[relay]\nbatch_size = {self._plan.batch}\n[routes."*"]\nto = "${{DESTINATION}}"\n')
        environment = {"OUTBOX_DATABASE": self._url, "DESTINATION": self._there.url, "OUTBOX_CONFIG": str(routes)}
        return _Relay(self._plan, log, {**environment, relays.TWIN: self._plan.twin or ""})

    def _said(self) -> str:
        """What the processes said last, for a failure."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs[-6:])


class _Relay(Logged):
    """`outbox relay`, or a twin of it."""

    def __init__(self, plan: Plan, log: Path, environment: dict[str, str]) -> None:
        command = ["-m", relays.__name__, "relay", "--lease", f"{plan.lease:g}s"]
        super().__init__(command, log, environment)
        self._log = log

    @property
    def works(self) -> bool:
        """Whether it runs, and does not stand by. It says so when it begins and when it ends to stand by."""
        said = self._log.read_text()
        return self.running and "relay: " in said and said.count("standing by") <= said.count("taking over")
