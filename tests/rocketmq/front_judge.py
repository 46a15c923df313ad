"""The judge of a storm at fronts: clients say what was answered and what came, the tables say what is stored.

The name of a message has a producer, a number and a fate. `plain` is a message by itself, `step` one of a message group
of the producer, `push` one for push consumers. Nobody acknowledges `never`, and the listener of a push consumer fails
with `fail`: both become dead letters. All others are transactions. Orphans are left without a verdict, until a producer
is asked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from outbox.store.half_messages.op import Op

#: The most questions about a transaction, RocketMQ's own number.
MOST_QUESTIONS = 15
#: Messages with such a fate become dead letters, after so many deliveries.
DEADLY, MOST_DELIVERIES = ("never", "fail"), 2
#: What producers answer about a transaction; nobody answers about `mute`.
ANSWERS: Mapping[str, Op | None] = {
    "commit": "commit", "rollback": "rollback", "torn": "commit", "orphan+": "commit", "orphan-": "rollback",
    "mute": None,
}  # fmt: skip


def fate(name: str) -> str:
    """Return what becomes of a message."""
    return name.split("/")[2]


class Sent(NamedTuple):
    """A message by itself was answered with OK."""

    name: str


class Half(NamedTuple):
    """A half message was answered with OK, at a moment."""

    name: str
    at: float


class Ended(NamedTuple):
    """A verdict was answered with OK."""

    name: str
    op: str


class Asked(NamedTuple):
    """A producer got a question, at a moment."""

    name: str
    at: float


class Got(NamedTuple):
    """A consumer got a message by a call that began at a moment; `checks`: what the message says about questions."""

    name: str
    call: str
    began: float
    at: float
    seconds: float
    checks: int


class Acked(NamedTuple):
    """A consumer has acknowledged a message; `ok`: the moment of the answer, if it was OK and the consumer knows it."""

    name: str
    began: float
    ok: float | None


Event = Sent | Half | Ended | Asked | Got | Acked
KINDS: Mapping[str, type[Event]] = {each.__name__: each for each in (Sent, Half, Ended, Asked, Got, Acked)}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a storm left behind. `stored`: rows of the log by name, without the half messages.

    `halves`: the half messages by name. `parked`: the states of messages that consumers are not done with. `given_up`:
    the questions about those that wait for a person. `faults`: the moments at which a fault was over. `asked_within`:
    seconds, from the half message or the last fault on.
    """

    events: list[Event]
    stored: Counter[str]
    halves: Counter[str]
    verdicts: Mapping[str, str]
    parked: Mapping[str, str] = field(default_factory=dict)
    given_up: Mapping[str, int] = field(default_factory=dict)
    faults: Sequence[float] = ()
    asked_within: float = 0.0

    @property
    def dead(self) -> set[str]:
        """The dead letters."""
        return {name for name, state in self.parked.items() if state == "dead"}

    @property
    def waits(self) -> dict[str, float]:
        """How long transactions were open until a producer was asked first, since the last fault before."""
        halves = {each.name: each.at for each in self.events if isinstance(each, Half)}
        waits: dict[str, float] = {}
        for each in sorted((each for each in self.events if isinstance(each, Asked)), key=lambda asked: asked.at):
            if each.name in halves and each.name not in waits:
                since = max([halves[each.name], *(fault for fault in self.faults if fault < each.at)])
                waits[each.name] = each.at - since
        return waits


def judge(outcome: Outcome) -> dict[str, list[str]]:
    """Return the names of the messages with what must not be, by kind."""
    found = {kind: sorted({*names}) for kind, names in _Judge(outcome).found().items()}
    return {kind: names for kind, names in found.items() if names}


class _Judge:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._sent = {each.name for each in outcome.events if isinstance(each, Sent)}
        self._ended = {(each.name, each.op) for each in outcome.events if isinstance(each, Ended)}
        self._asked = Counter(each.name for each in outcome.events if isinstance(each, Asked))
        self._got: dict[str, list[Got]] = defaultdict(list)
        self._acked: dict[str, list[Acked]] = defaultdict(list)
        for got in sorted((each for each in outcome.events if isinstance(each, Got)), key=lambda got: got.at):
            self._got[got.name].append(got)
        for acked in (each for each in outcome.events if isinstance(each, Acked)):
            self._acked[acked.name].append(acked)

    def found(self) -> dict[str, Iterable[str]]:
        outcome, verdicts, dead = self._outcome, self._outcome.verdicts, self._outcome.dead
        committed = {name for name, op in verdicts.items() if op == "commit"}
        due = self._sent | committed
        done = due - outcome.parked.keys()
        other = {name for name, op in verdicts.items() if op != ANSWERS[fate(name)]}
        return {
            "lost": (due - self._got.keys() - dead) | (done - self._acked.keys()),
            "held": outcome.parked.keys() - dead,
            "dead": [name for name in dead if fate(name) not in DEADLY],
            "dead and done": [name for name in dead if self._done_at(name) is not None],
            "tried too often": [name for name in dead if len(self._got.get(name, ())) > MOST_DELIVERIES],
            "phantom": [name for name in self._got if fate(name) in ANSWERS and name not in committed],
            "opposite": [name for name, op in self._ended if verdicts.get(name) != op],
            "contradicted": [name for name in other if fate(name) != "torn"],
            "undecided": [name for name in outcome.halves.keys() - verdicts.keys() if fate(name) != "mute"],
            "twice": [name for rows in (outcome.stored, outcome.halves) for name, number in rows.items() if number > 1],
            "early": [name for name in self._got if self._is_early(name)],
            "after ack": [name for name in self._got if self._is_after_ack(name)],
            "order": self._disordered(),
            "unheard": [name for name, number in self._counted().items() if number > self._asked[name]],
            "asked late": [name for name, wait in outcome.waits.items() if wait > outcome.asked_within],
            "asked too often": [name for name, number in self._counted().items() if number > MOST_QUESTIONS],
        }

    def _is_early(self, name: str) -> bool:
        """The time of a message begins after its call, and ends before the next call gets the message."""
        return any(later.at < earlier.began + earlier.seconds for earlier, later in pairwise(self._got[name]))

    def _is_after_ack(self, name: str) -> bool:
        done = self._done_at(name)
        return done is not None and any(got.began > done for got in self._got[name])

    def _done_at(self, name: str) -> float | None:
        """When the first acknowledgement of a message was answered with OK."""
        return min((each.ok for each in self._acked.get(name, ()) if each.ok is not None), default=None)

    def _disordered(self) -> Iterable[str]:
        """A step comes first by the same call as the one before, or after the acknowledgement of that has begun."""
        steps: dict[str, list[str]] = defaultdict(list)
        for name in self._sent:
            if fate(name) == "step":
                steps[name.split("/")[0]].append(name)
        for of_group in steps.values():
            of_group.sort(key=lambda name: int(name.split("/")[1]))
            for earlier, later in pairwise(of_group):
                if not self._got[earlier] or not self._got[later]:
                    continue
                first = self._got[later][0]
                together = any(got.call == first.call for got in self._got[earlier])
                if not together and not any(acked.began < first.at for acked in self._acked[earlier]):
                    yield later

    def _counted(self) -> dict[str, int]:
        """How many questions were counted, by name, as far as anybody says."""
        counted = {name: max(got.checks for got in all_got) for name, all_got in self._got.items() if all_got}
        return counted | dict(self._outcome.given_up)
