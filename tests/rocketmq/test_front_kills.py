"""Fronts under fire: they are killed and frozen while clients send, end transactions, are asked, and receive.

The judge is in `front_judge.py`, the clients in `front_fire.py`.
"""

from __future__ import annotations

import random
import signal
import socket
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.model.limits import HALF_TOPIC
from outbox.rocketmq.front.declaring import Declarations
from outbox.store.database import Database
from outbox.testing.servers.process import free_port
from tests.rocketmq import front_fire
from tests.rocketmq.fire_business import reading
from tests.rocketmq.front_fire import CLIENTS, DEADLY_GROUPS, DIES_SOON, IMMUNITY, INTERVAL, STOPS_SOON, Task
from tests.rocketmq.front_judge import (
    KINDS,
    MOST_DELIVERIES,
    MOST_QUESTIONS,
    Acked,
    Asked,
    Ended,
    Event,
    Got,
    Half,
    Outcome,
    Sent,
    judge,
)
from tests.scenarios.exactness.runs import Child
from tests.support.records import RecordFile
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

#: A front that is frozen for so long has lost every lease.
FREEZE_SECONDS = 12.0
#: A lease, and room for a busy machine on which a front or a client begins late.
_LEASE, _ROOM = timedelta(seconds=10), timedelta(seconds=30)
_HALVES = f"SELECT key, body FROM outbox_message WHERE topic = '{HALF_TOPIC}'"
_STORED = f"SELECT body FROM outbox_message WHERE topic <> '{HALF_TOPIC}'"
_VERDICTS = "SELECT transaction_id, op FROM outbox_op"
_PARKED = "SELECT body, coalesce(state, 'behind') FROM outbox_parked WHERE subscription LIKE '%|%'"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of what; `lanes`: so many producers, and as many consumers of each kind. `hasty`: see `Task`."""

    fronts: int = 1
    lanes: int = 4
    kills: int = 3
    freezes: int = 1
    hasty: bool = False


class Storm:
    """Fronts on one database, a process with producers, one with consumers, and one with push consumers."""

    def __init__(self, engine: Engine, folder: Path, plan: Plan) -> None:
        self._engine, self._plan, self._folder = engine, plan, folder
        self._reading = reading(engine.url.render_as_string(hide_password=False))
        self._ports = tuple(free_port() for _ in range(plan.fronts))
        self._log = folder / "log"
        self._history = RecordFile(folder / "history")
        self._fronts: list[Child] = []
        self._clients: list[Child] = []
        self._faults: list[float] = []

    def perform(self) -> dict[str, list[str]]:
        """Let clients work while fronts are killed and frozen, wait until all is settled, and judge."""
        began = time.monotonic()
        with closing(Database(self._engine).open()) as channel:
            for group in DEADLY_GROUPS:
                Declarations(channel).add_group(group, ordered=False, retries=MOST_DELIVERIES - 1)
        try:
            self._fronts = [self._front(number) for number in range(self._plan.fronts)]
            self._clients = [self._start(role, self._ports, self._plan.lanes) for role in CLIENTS]
            assert eventually(lambda: len(self.events()) > 20 * self._plan.lanes, 120), self._words()
            self._make_trouble()
            (self._folder / "calm").touch()
            eventually(self._is_over, 180 + INTERVAL.total_seconds() * MOST_QUESTIONS)
            (self._folder / "enough").touch()
            for each in self._clients:
                assert each.wait(120) == 0, self._words()
            assert all(each.running for each in self._fronts), self._words()
        finally:
            for each in (*self._clients, *self._fronts):
                each.end(signal.SIGKILL)
        outcome = self.outcome()
        found = judge(outcome)
        counts = dict(Counter(type(each).__name__ for each in outcome.events))
        verdicts = dict(Counter(outcome.verdicts.values()))
        wrong = {kind: len(names) for kind, names in found.items()}
        given_up = dict(Counter(outcome.given_up.values()))
        print(
            f"{counts}, dead letters {len(outcome.dead)}, verdicts {verdicts}, given up after {given_up},"
            f" points {dict(Counter(self._points()))}, asked within {max(outcome.waits.values(), default=0):.1f} s,"
            f" wrong {wrong}, {time.monotonic() - began:.0f} s"
        )
        return found

    def events(self) -> list[Event]:
        """What clients have told so far."""
        return [KINDS[kind](*fields) for kind, *fields in self._history.read()]

    def outcome(self) -> Outcome:
        """What clients have told, and what is stored."""
        outbox = Outbox(self._engine)
        pending = outbox.admin.half_transactions(given_up=True, limit=10_000)
        outbox.close()
        parked = {bytes(body).decode(): state for body, state in self._rows(_PARKED)}
        verdicts, events = self._rows(_VERDICTS), self.events()
        # Read last: there may be more of them than when the others were read.
        halves = [(transaction, bytes(body).decode()) for transaction, body in self._rows(_HALVES)]
        names = dict(halves)
        return Outcome(
            events=events,
            stored=Counter(bytes(body).decode() for (body,) in self._rows(_STORED)),
            halves=Counter(name for _, name in halves),
            verdicts={names[transaction]: op for transaction, op in verdicts},
            parked=parked,
            given_up={names[each.transaction_id]: each.checks for each in pending},
            faults=self._faults,
            asked_within=(IMMUNITY + INTERVAL + _LEASE + _ROOM).total_seconds(),
        )

    def _make_trouble(self) -> None:
        """Kill and freeze fronts: every other time at a point of their code, else at any moment."""
        trouble = ["kill"] * self._plan.kills + ["freeze"] * self._plan.freezes
        random.shuffle(trouble)
        for turn, each in enumerate(trouble):
            number = random.randrange(len(self._fronts))
            assert eventually(partial(_is_open, self._ports[number])), self._words()
            if each == "kill":
                self._kill(number, soon=turn % 2 == 0)
            else:
                self._freeze(number, soon=turn % 2 == 0)
            self._faults.append(time.monotonic())
            time.sleep(random.uniform(1, 4))

    def _kill(self, number: int, *, soon: bool) -> None:
        front = self._fronts[number]
        if soon:
            front.send_signal(DIES_SOON)
            assert eventually(lambda: not front.running), self._words()
        front.end(signal.SIGKILL)
        self._fronts[number] = self._front(number)

    def _freeze(self, number: int, *, soon: bool) -> None:
        front, points = self._fronts[number], len(self._points())
        if soon:
            front.send_signal(STOPS_SOON)
            assert eventually(lambda: len(self._points()) > points), self._words()
        front.send_signal(signal.SIGSTOP)
        time.sleep(FREEZE_SECONDS)
        front.send_signal(signal.SIGCONT)

    def _points(self) -> list[str]:
        """Return the points at which fronts have died or stopped."""
        path = self._folder / "points"
        return path.read_text().split() if path.exists() else []

    def _is_over(self) -> bool:
        """True when every transaction is settled or given up, and everything has come."""
        outcome = self.outcome()
        open_ones = outcome.halves.keys() - outcome.verdicts.keys() - outcome.given_up.keys()
        got = {each.name for each in outcome.events if isinstance(each, Got)}
        return not open_ones and not outcome.parked.keys() ^ outcome.dead and not outcome.stored.keys() - got

    def _front(self, number: int) -> Child:
        return self._start("front", (self._ports[number],), 0)

    def _start(self, role: str, ports: tuple[int, ...], lanes: int) -> Child:
        url = self._engine.url.render_as_string(hide_password=False)
        task = Task(role=role, folder=str(self._folder), ports=ports, url=url, lanes=lanes, hasty=self._plan.hasty)
        return Child(front_fire, task, self._log)

    def _rows(self, question: str) -> list[Any]:
        with self._reading.connect() as connection:
            return [tuple(row) for row in connection.execute(text(question))]

    def _words(self) -> str:
        return self._log.read_text()[-6000:]


def _is_open(port: int) -> bool:
    """Whether somebody listens at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fronts", [1, 2])
def test_what_fronts_have_promised_holds_when_they_are_killed_and_frozen(
    engine: Engine, tmp_path: Path, fronts: int, full: bool
) -> None:
    """Consumers get what was stored or committed, nothing else, each in its order and at its time."""
    plan = Plan(fronts=fronts, lanes=8, kills=20, freezes=5) if full else Plan(fronts=fronts)

    found = Storm(engine, tmp_path, plan).perform()

    assert found == {}


def test_a_front_that_answers_before_its_commit_is_caught(pg_engine: Engine, tmp_path: Path) -> None:
    plan = Plan(kills=4, freezes=0, hasty=True)

    found = Storm(pg_engine, tmp_path, plan).perform()

    assert "lost" in found


ORPHAN, PAID, PLAIN, STEPS = "0/1/orphan+", "0/2/rollback", "0/3/plain", ("0/4/step", "0/5/step")
DEAD = "0/9/never"
GOOD = Outcome(
    events=[
        Sent(PLAIN), Sent(DEAD), Half(ORPHAN, 0), Asked(ORPHAN, 1), Ended(ORPHAN, "commit"), Ended(PAID, "rollback"),
        *(Sent(each) for each in STEPS),
        Got(ORPHAN, "a", 1, 2, 10, 1), Acked(ORPHAN, 2, None),
        Got(DEAD, "a", 1, 2, 10, 0), Got(DEAD, "b", 11, 12, 10, 0),
        Got(PLAIN, "b", 3, 3, 10, 0), Got(PLAIN, "c", 13, 14, 10, 0), Acked(PLAIN, 14, 15),
        Got(STEPS[0], "d", 3, 3, 10, 0), Acked(STEPS[0], 4, None), Got(STEPS[1], "e", 4, 5, 10, 0),
        Acked(STEPS[1], 5, 6),
    ],
    stored=Counter([ORPHAN, PLAIN, DEAD, *STEPS]),
    halves=Counter([ORPHAN, PAID]),
    verdicts={ORPHAN: "commit", PAID: "rollback"},
    parked={DEAD: "dead"},
    asked_within=1,
)  # fmt: skip


def changed(*more: Event, without: Event | None = None, **fields: Any) -> Outcome:
    """The good outcome with other events."""
    return replace(GOOD, events=[*(each for each in GOOD.events if each != without), *more], **fields)


@pytest.mark.parametrize(
    ("outcome", "found"),
    [
        (GOOD, {}),
        (changed(Sent("0/6/plain")), {"lost": ["0/6/plain"]}),
        (changed(without=Got(ORPHAN, "a", 1, 2, 10, 1)), {"lost": [ORPHAN]}),
        (changed(without=Acked(ORPHAN, 2, None)), {"lost": [ORPHAN]}),
        (changed(parked={}), {"lost": [DEAD]}),
        (changed(parked={DEAD: "out"}), {"held": [DEAD]}),
        (changed(parked={DEAD: "dead", PLAIN: "dead"}), {"dead": [PLAIN], "dead and done": [PLAIN]}),
        (changed(Got(DEAD, "g", 21, 22, 10, 0)), {"tried too often": [DEAD]}),
        (changed(Got(PAID, "f", 1, 2, 10, 0)), {"phantom": [PAID]}),
        (changed(Ended(ORPHAN, "rollback")), {"opposite": [ORPHAN]}),
        (
            replace(GOOD, verdicts={ORPHAN: "commit", PAID: "commit"}),
            {"contradicted": [PAID], "lost": [PAID], "opposite": [PAID]},
        ),
        (replace(GOOD, halves=Counter([ORPHAN, PAID, "0/7/orphan-"])), {"undecided": ["0/7/orphan-"]}),
        (replace(GOOD, stored=Counter([PLAIN, PLAIN])), {"twice": [PLAIN]}),
        (replace(GOOD, halves=Counter([PAID, PAID])), {"twice": [PAID]}),
        (changed(Got(ORPHAN, "f", 10, 10.5, 10, 1)), {"early": [ORPHAN]}),
        (changed(Got(PLAIN, "f", 30, 31, 10, 0)), {"after ack": [PLAIN]}),
        (changed(without=Acked(STEPS[0], 4, None)), {"lost": [STEPS[0]], "order": [STEPS[1]]}),
        (changed(Half("0/8/mute", 0), given_up={"0/8/mute": 1}), {"unheard": ["0/8/mute"]}),
        (changed(*[Asked(ORPHAN, 1)] * 15, given_up={ORPHAN: 16}), {"asked too often": [ORPHAN]}),
        (replace(GOOD, asked_within=0.5), {"asked late": [ORPHAN]}),
    ],
)
def test_the_judge_finds(outcome: Outcome, found: dict[str, list[str]]) -> None:
    assert judge(outcome) == found
