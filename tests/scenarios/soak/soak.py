"""A soak: a plan happens to a world, lane by lane; afterwards everything has to be in order without anybody's help."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg

from tests.scenarios.soak.actions import Actions
from tests.scenarios.soak.growth import Change, changes
from tests.scenarios.soak.judge import Bounds, Findings, Outcome, judge
from tests.scenarios.soak.plan import KINDS, PARTITIONS, RESTARTING, Action, latest, plan_of
from tests.scenarios.soak.world import BATCH, DEADLINE_SECONDS, LEASE_SECONDS, World
from tests.support.waiting import eventually

#: The subscriptions of the plan. A restart of PostgreSQL may take back a batch of each of their partitions.
_SUBSCRIPTIONS = 3
#: Seconds between two tries of a destination that is away, at most.
_PAUSE = 5.0
BOUNDS = Bounds(
    unsettled=BATCH * _SUBSCRIPTIONS * PARTITIONS,
    deadline=DEADLINE_SECONDS,
    slack=LEASE_SECONDS + _PAUSE + DEADLINE_SECONDS,
)
#: Seconds until everything has been sent, on a machine that is busy.
_PATIENCE = 300.0
#: A relay loads the driver of a destination when it first gets messages for it: 12 MB. Connections come and go with
#: those who are restarted.
_MEMORY_SHARE, _MEMORY_MORE = 0.05, 15.0
_CONNECTIONS_SHARE, _CONNECTIONS_MORE = 0.25, 5.0
#: In a shorter soak a restart of the database takes a large part of a quarter, and few connections are left in it.
_CONNECTIONS_SECONDS = 300.0


@dataclass(kw_only=True)
class Report:
    """What came of a soak. `manual`: what would have needed a person; `grown`: what has grown over time."""

    seed: int
    findings: Findings
    messages: int
    calls: int
    discarded: int
    done: Counter[str] = field(default_factory=Counter)
    manual: list[str] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)
    #: The figures over time: the memory of processes that lived for long, in MB, and the connections of the database.
    changes: dict[str, Change] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        changes = ", ".join(f"{name} {change}" for name, change in self.changes.items())
        return (
            f"seed {self.seed}: {self.messages} messages, {self.calls} calls, {self.discarded} discarded;"
            f" {self.findings}; manual actions {self.manual or 'none'}; grown {self.grown or 'nothing'}"
            f" ({changes}); {dict(sorted(self.done.items()))}; {self.seconds:.0f} s"
        )


class Soak:
    """One soak of some length."""

    def __init__(self, world: World, seed: int, seconds: float) -> None:
        self._world = world
        self._seed = seed
        self._seconds = seconds
        self._actions = Actions(world)
        self._done: Counter[str] = Counter()
        self._figures: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._connections: list[tuple[float, float]] = []
        self._over = threading.Event()

    def perform(self) -> Report:
        """Let everything happen, wait until all is sent, and judge."""
        self._actions.begin()
        began = time.monotonic()
        sampling = [threading.Thread(target=each) for each in (self._sample_memory, self._sample_connections)]
        for each in sampling:
            each.start()
        try:
            self._let_happen(plan_of(self._seed, self._seconds), began)
        finally:
            self._over.set()
            for each in sampling:
                each.join()
        manual = self._come_to_rest()
        return self._report(manual, time.monotonic() - began)

    def _let_happen(self, plan: Sequence[Action], began: float) -> None:
        lanes = [[action for action in plan if action.lane == lane] for lane in KINDS]
        with ThreadPoolExecutor(len(lanes)) as pool:
            running = [pool.submit(self._follow, lane, began) for lane in lanes]
            for each in running:
                each.result()

    def _follow(self, lane: Sequence[Action], began: float) -> None:
        """Do the actions of a lane in their time. A long one delays the next ones; what is too late is left out."""
        for action in lane:
            time.sleep(max(0.0, began + action.at - time.monotonic()))
            if time.monotonic() > began + latest(action, self._seconds):
                continue
            begins = time.monotonic()
            self._actions.do(action)
            print(
                f"{begins - began:.1f} to {time.monotonic() - began:.1f}: {action.lane} {action.kind} {action.number}"
            )
            self._done[f"{action.lane} {action.kind}"] += 1

    def _sample_memory(self) -> None:
        """Note the memory of every process once a second."""
        while not self._over.wait(1.0):
            now = time.monotonic()
            for name, figure in self._world.memory().items():
                self._figures[name].append((now, figure))

    def _sample_connections(self) -> None:
        """Note how many connections the database has, once a second while it answers."""
        while not self._over.wait(1.0):
            with suppress(psycopg.OperationalError):
                self._connections.append((time.monotonic(), self._world.connections()))

    def _come_to_rest(self) -> list[str]:
        """End the writers; return what is not in order by itself when the relays had their time."""
        self._actions.replay()
        for writer in self._world.writers:
            writer.stop()
        found = []
        if not eventually(self._world.all_sent, _PATIENCE):
            found.append("messages wait")
        codes = [relay.stop() for relay in self._world.relays]
        # A relay that has only just been started knows no signals yet.
        found += [f"a relay ended with {code}" for code in codes if code not in (0, -signal.SIGTERM)]
        return found

    def _report(self, manual: list[str], seconds: float) -> Report:
        outcome = Outcome(
            facts=self._world.facts(),
            stored=self._world.stored(),
            calls=self._world.calls(),
            troubles=self._world.troubles,
            outages=self._world.outages,
            discarded=self._actions.discarded,
        )
        memory = changes(self._figures, least_seconds=self._seconds * (1 - RESTARTING) * 0.8)
        connections = changes({"connections": self._connections}, least_seconds=_CONNECTIONS_SECONDS)
        grown = [name for name, each in memory.items() if each.is_growth(share=_MEMORY_SHARE, more=_MEMORY_MORE)]
        for name, each in connections.items():
            if each.is_growth(share=_CONNECTIONS_SHARE, more=_CONNECTIONS_MORE):
                grown.append(name)
        return Report(
            seed=self._seed,
            findings=judge(outcome, BOUNDS),
            messages=len(outcome.facts),
            calls=len(outcome.calls),
            discarded=len(outcome.discarded),
            done=self._done,
            manual=manual,
            grown=grown,
            changes=memory | connections,
            seconds=seconds,
        )
