"""A run: writer processes, relay processes, and the trouble that comes to them; judged at the end."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Engine, NullPool, create_engine, text

from tests.scenarios.exactness import relays, writers
from tests.scenarios.exactness.business import facts, set_up
from tests.scenarios.exactness.history import Delivery, Fault, Findings, HistoryFile, judge
from tests.support.programs import NOTHING_MORE, Program
from tests.support.waiting import eventually


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of what. `quota` messages are committed by each writer."""

    writers: int = 8
    quota: int
    keys: int = 40
    relays: int = 2
    rows: int = 100
    #: Longer than a relay on a busy machine gets no turn: a lease that ends without a fault excuses no copies.
    lease: float = 10.0
    pause: float = 0.0005
    long: int = 4
    seconds: float = 2.0
    trouble: tuple[Literal["kill", "stop"], ...] = ("kill", "stop")
    least_trouble: int = 3
    #: Whether a relay that is stopped while it writes lets nobody else write.
    one_writer: bool = False
    #: How long nothing may come before what is missing counts as lost.
    patience: float = 180.0
    twin: str | None = None


@dataclass(kw_only=True)
class Report:
    """What came of a run."""

    findings: Findings
    messages: int
    deliveries: int
    #: How hard it was: ids that were rolled back, and rows with a transaction that began before that of an earlier row.
    taken_back: int
    early: int
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = {kind: self.faults.count(kind) for kind in sorted(set(self.faults))}
        hard = f"{self.taken_back} ids taken back, {self.early} early transactions"
        return f"{self.messages} messages, {self.findings}, faults {kinds}, {hard}, {self.seconds:.0f} s"


class Logged(Program):
    """A process of the run; everything it says goes to a log. `environment`: more variables than ours."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] = NOTHING_MORE) -> None:
        with log.open("ab") as output:
            super().__init__(arguments, environment=environment, stdout=output, stderr=output)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.poll() is None

    def end(self, number: signal.Signals, patience: float = 20.0) -> int:
        """Send a signal and wait for the end, which comes in any case."""
        self.send_signal(number)
        try:
            return self.wait(patience)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()


class Child(Logged):
    """A module of these tests as a process, with its task."""

    def __init__(self, module: Any, task: Any, log: Path) -> None:
        super().__init__(["-m", module.__name__, json.dumps(asdict(task))], log)


class Run:
    """One run on one database."""

    def __init__(self, engine: Engine, folder: Path, plan: Plan, seed: int) -> None:
        self._engine = engine
        self._url = engine.url.render_as_string(hide_password=False)
        #: On SQLite its transactions wait for no writer, which those of an outbox's engine do.
        self._reading = create_engine(self._url, poolclass=NullPool)
        self._plan = plan
        self._path = folder / "history"
        self.log = folder / "processes.log"
        self._enough = folder / "enough"
        self._history = HistoryFile(self._path)
        self._seed = seed
        self._random = random.Random(seed)
        self._relays: list[Child] = []
        self._writers: list[Child] = []
        self._faults: list[str] = []

    def perform(self) -> Report:
        """Set up, let everything happen, wait until nothing more comes, and judge."""
        began = time.monotonic()
        set_up(self._engine, self._plan.keys)
        try:
            self._relays = [self._relay() for _ in range(self._plan.relays)]
            self._writers = [self._writer(number) for number in range(self._plan.writers)]
            self._make_trouble()
            self._wait_until_all_came()
            for relay in self._relays:
                relay.end(signal.SIGTERM)
        finally:
            for child in (*self._writers, *self._relays):
                child.end(signal.SIGKILL)
        history, committed = self._history.read(), facts(self._reading)
        taken_back, early = self._hardness()
        return Report(
            findings=judge(committed, history, batch=self._plan.rows),
            messages=len(committed),
            deliveries=sum(isinstance(event, Delivery) for event in history),
            taken_back=taken_back,
            early=early,
            faults=self._faults,
            seconds=time.monotonic() - began,
        )

    def _hardness(self) -> tuple[int, int]:
        number = "xact_id" if self._engine.dialect.name == "postgresql" else "id"
        highest = f"max({number}) OVER (ORDER BY id) AS highest"
        statement = f"""
            SELECT max(id) - count(*), count(*) FILTER (WHERE number < highest)
            FROM (SELECT id, {number} AS number, {highest} FROM outbox_message) AS m"""
        with self._reading.connect() as connection:
            taken_back, early = connection.execute(text(statement)).one()
        return taken_back, early

    def _relay(self) -> Child:
        plan = self._plan
        task = relays.Task(
            url=self._url,
            history=str(self._path),
            rows=plan.rows,
            lease=plan.lease,
            pause=plan.pause,
            twin=plan.twin,
        )
        return Child(relays, task, self.log)

    def _writer(self, number: int) -> Child:
        plan = self._plan
        task = writers.Task(
            url=self._url,
            number=number,
            quota=plan.quota,
            enough=str(self._enough),
            keys=plan.keys,
            seed=self._seed * 1000 + number,
            long=plan.long,
            seconds=plan.seconds,
        )
        return Child(writers, task, self.log)

    def _make_trouble(self) -> None:
        """One fault after the other while the writers write; the relays recover from one before the next."""
        while self._plan.trouble and self._writing:
            if len(self._faults) >= self._plan.least_trouble:
                self._enough.touch()
            self._wait(lambda: self._active() is not None or not self._writing)
            active = self._active()
            if active is None:
                break
            time.sleep(self._random.uniform(0, 1))
            kind = self._plan.trouble[len(self._faults) % len(self._plan.trouble)]
            if kind == "kill":
                self._kill(active)
            elif not self._stop(active):
                continue
            self._faults.append(kind)
        self._enough.touch()
        self._wait(lambda: not self._writing)
        for writer in self._writers:
            assert writer.end(signal.SIGCONT) == 0, f"a writer failed: {self.log.read_text()[-3000:]}"

    @property
    def _writing(self) -> bool:
        return any(writer.running for writer in self._writers)

    def _kill(self, relay: Child) -> None:
        self._history.append(Fault("kill", relay.pid))
        relay.end(signal.SIGKILL)
        self._relays.remove(relay)
        self._relays.append(self._relay())
        self._wait(lambda: self._replaced(relay))

    def _stop(self, relay: Child) -> bool:
        """Stop a relay until another has taken its place, then let it go on where it was.

        False when none could: where only one may write, everybody waits for the one that was stopped while it did.
        """
        self._history.append(Fault("stop", relay.pid))
        relay.send_signal(signal.SIGSTOP)
        replaced = eventually(lambda: self._replaced(relay), 3 * self._plan.lease if self._plan.one_writer else 300.0)
        relay.send_signal(signal.SIGCONT)
        assert replaced or self._plan.one_writer, "nobody took the place of a stopped relay"
        return replaced

    def _active(self) -> Child | None:
        """The relay that delivered last, if it is one that runs."""
        last = next((event for event in reversed(self._history.read()) if isinstance(event, Delivery)), None)
        return next((relay for relay in self._relays if last is not None and relay.pid == last.relay), None)

    def _replaced(self, relay: Child) -> bool:
        """Whether another relay delivers, or there is nothing left to deliver."""
        return self._active() not in (None, relay) or not self._missing()

    def _missing(self) -> bool:
        if self._writing:
            return True
        came = {event.name for event in self._history.read() if isinstance(event, Delivery)}
        return any(fact.name not in came for fact in facts(self._reading))

    def _wait_until_all_came(self) -> None:
        """Until everything came, or nothing more has come for a long while."""
        length, since = -1, time.monotonic()
        while self._missing() and time.monotonic() - since < self._plan.patience:
            now = len(self._history.read())
            if now != length:
                length, since = now, time.monotonic()
            time.sleep(0.2)

    @staticmethod
    def _wait(fact: Callable[[], bool]) -> None:
        assert eventually(fact, 600), "what was waited for did not happen"
