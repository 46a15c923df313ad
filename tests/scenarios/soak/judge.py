"""The judge of a soak: compares what was committed with what is stored at the destinations, and reads every call.

A message may be handed over again when an answer said that it is not stored, when the call before was overdue, or after
trouble (a kill, a stop, a restart of the database). A trouble excuses no more than one unsettled batch of each
partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from tests.scenarios.exactness.history import Delivery, Fact, ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A batch that a relay handed over. `answered`: None, when no answer came; `done`: what it said to be stored."""

    handed: float
    names: tuple[str, ...]
    answered: float | None = None
    done: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Trouble:
    """A time in which something was broken."""

    began: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a soak left behind. The key of a fact and of a delivery is its unit of order.

    `stored`: by destination, each unit in the order in which a consumer gets it. `discarded`: by a person. `outages`:
    the times in which a destination did not work. These excuse nothing, but a worker may wait for a destination before
    it notices trouble.
    """

    facts: Sequence[Fact]
    stored: Mapping[str, Sequence[Delivery]]
    calls: Sequence[Call]
    troubles: Sequence[Trouble]
    outages: Sequence[Trouble] = ()
    discarded: AbstractSet[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What trouble excuses: `unsettled` messages that come again.

    `deadline`: the seconds after which a call is overdue. `slack`: the seconds for which a worker may not yet have
    noticed trouble that is over.
    """

    unsettled: int
    deadline: float
    slack: float


@dataclass(slots=True)
class Findings:
    """What must not be. `repeated`: how many messages came again after trouble, which may be."""

    lost: list[str] = field(default_factory=list)
    phantom: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    #: Messages that are in one batch twice.
    doubled: list[str] = field(default_factory=list)
    #: Copies that nothing excuses.
    excess: list[str] = field(default_factory=list)
    repeated: int = 0

    @property
    def wrong(self) -> dict[str, list[str]]:
        """Everything that must not be."""
        kinds = ("lost", "phantom", "violations", "altered", "doubled", "excess")
        return {kind: getattr(self, kind) for kind in kinds if getattr(self, kind)}

    def __str__(self) -> str:
        wrong = "; ".join(f"{kind} {len(texts)}: {', '.join(texts[:3])}" for kind, texts in self.wrong.items())
        return f"{wrong or 'nothing is wrong'}, {self.repeated} repeated after trouble"


def judge(outcome: Outcome, bounds: Bounds) -> Findings:
    """Find everything that must not be."""
    facts = {fact.name: fact for fact in outcome.facts}
    names = {delivery.name for stored in outcome.stored.values() for delivery in stored}
    handed = Counter(name for call in outcome.calls for name in call.names)
    repeats = _Repeats(outcome.troubles, outcome.outages, bounds)
    excess = [*_more_often_than_handed(outcome.stored, handed), *repeats.without_excuse(outcome.calls)]
    return Findings(
        lost=sorted(facts.keys() - names - outcome.discarded),
        phantom=sorted((names | handed.keys()) - facts.keys()),
        violations=[*_overtaken(facts, outcome), *_answered_in_another_order(facts, outcome.calls)],
        altered=list(_altered(facts, outcome.stored)),
        doubled=sorted({name for call in outcome.calls for name, times in Counter(call.names).items() if times > 1}),
        excess=excess,
        repeated=repeats.excused,
    )


def _overtaken(facts: Mapping[str, Fact], outcome: Outcome) -> Iterator[str]:
    for where, stored in outcome.stored.items():
        for name, before in _out_of_order(facts, [delivery.name for delivery in stored]):
            yield f"{name} is stored behind {before} at {where}"


def _answered_in_another_order(facts: Mapping[str, Fact], calls: Sequence[Call]) -> Iterator[str]:
    """Find what was stored behind a later message of its unit, at whatever destination."""
    answered = sorted((call.answered, call.names, call.done) for call in calls if call.answered is not None)
    in_order = [name for _, names, done in answered for name in names if name in done]
    for name, before in _out_of_order(facts, in_order):
        yield f"{name} was answered behind {before}"


def _out_of_order(facts: Mapping[str, Fact], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each name whose first copy comes behind that of a later message of its unit, and the later message."""
    place = ranks(facts.values())
    last: dict[str, str] = {}
    for name in dict.fromkeys(names):
        key = facts[name].key if name in facts else None
        if key is None:
            continue
        if key in last and place[name] < place[last[key]]:
            yield name, last[key]
        else:
            last[key] = name


def _altered(facts: Mapping[str, Fact], everywhere: Mapping[str, Sequence[Delivery]]) -> Iterator[str]:
    for where, stored in everywhere.items():
        copies: dict[str, str] = {}
        for delivery in stored:
            fact = facts.get(delivery.name)
            same = copies.setdefault(delivery.name, delivery.copy) == delivery.copy
            if fact is not None and not (same and fact.key == delivery.key):
                yield f"{delivery.name} at {where}"


def _more_often_than_handed(everywhere: Mapping[str, Sequence[Delivery]], handed: Counter[str]) -> Iterator[str]:
    stored = Counter(delivery.name for stored in everywhere.values() for delivery in stored)
    for name, times in (stored - handed).items():
        yield f"{name} is stored {times} times more often than it was handed over"


class _Repeats:
    """Charges each repeated message to a trouble."""

    def __init__(self, troubles: Sequence[Trouble], outages: Sequence[Trouble], bounds: Bounds) -> None:
        # The time of each trouble, until every worker has noticed it.
        self._charged = {Trouble(each.began, _noticed(each, outages, bounds.slack)): 0 for each in troubles}
        self._bounds = bounds
        self.excused = 0

    def without_excuse(self, calls: Sequence[Call]) -> Iterator[str]:
        """Yield what was handed over again although nothing excuses it."""
        before: dict[str, Call] = {}
        for call in sorted(calls, key=lambda each: each.handed):
            for name in dict.fromkeys(call.names):
                last = before.get(name)
                if last is not None and not self._is_due_again(name, last, call) and not self._charge(last, call):
                    yield f"{name} was handed over again after {call.handed - last.handed:.3f} s"
                before[name] = call

    def _is_due_again(self, name: str, last: Call, call: Call) -> bool:
        """Return whether the call before said that it is not stored, or was overdue."""
        overdue = last.handed + self._bounds.deadline
        if last.answered is not None and last.answered <= call.handed:
            return name not in last.done or last.answered > overdue
        return call.handed > overdue

    def _charge(self, last: Call, call: Call) -> bool:
        """Charge a repeat to the trouble that has excused the least; return False if none can."""
        able = [each for each in self._charged if each.began <= call.handed and last.handed <= each.ended]
        least = min(able, key=self._charged.__getitem__, default=None)
        if least is None or self._charged[least] >= self._bounds.unsettled:
            return False
        self._charged[least] += 1
        self.excused += 1
        return True


def _noticed(trouble: Trouble, outages: Sequence[Trouble], slack: float) -> float:
    """Return when every worker has noticed trouble, which is later for one that waits for its destination."""
    end = trouble.ended + slack
    for outage in sorted(outages, key=lambda each: each.began):
        if outage.began <= end:
            end = max(end, outage.ended + slack)
    return end
