"""What is measured: a ratio of two figures that were taken in turn, several times, and the goal that it has."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound that a ratio should keep."""

    bound: float
    at_most: bool

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:.2f}"

    def met_by(self, value: float) -> bool:
        """Whether a ratio keeps the bound."""
        return value <= self.bound if self.at_most else value >= self.bound


def at_most(bound: float) -> Goal:
    """For times: less is better."""
    return Goal(bound, at_most=True)


def at_least(bound: float) -> Goal:
    """For rates: more is better."""
    return Goal(bound, at_most=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One benchmark's outcome: the figures of each round, and what they are compared with."""

    name: str
    goal: Goal
    unit: str
    ours: list[float]
    other: list[float]
    remark: str = ""

    @property
    def rounds(self) -> list[float]:
        """The ratio in each round; its two figures were taken one right after the other."""
        return [ours / other for ours, other in zip(self.ours, self.other, strict=True)]

    @property
    def value(self) -> float:
        """The median ratio."""
        return median(self.rounds)

    @property
    def met(self) -> bool:
        """Whether the goal is kept."""
        return self.goal.met_by(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured; each figure is what one round of one side takes.

    All of it takes about half an hour on two cores: many rounds would show no more than a few, because both sides meet
    the same machine.
    """

    rounds: int = 3
    transactions: int = 1_500
    #: How often it is each side's turn, and for how long.
    business_turns: int = 6
    business_seconds: float = 0.3
    warm_up_seconds: float = 0.3
    imports: int = 5
    #: So many that the time to connect does not count. Beside a held snapshot fewer: the other side is slow there.
    drained: int = 500_000
    drained_pinned: int = 100_000
    passed: int = 200_000
    latency_messages: int = 400
    random_seconds: float = 6.0
    writer_seconds: float = 30.0
    #: Before good messages are measured beside what cannot be sent; and how much of that there is.
    trouble_seconds: float = 15.0
    troubled: int = 100_000
    unknown_topics: int = 4_000
    flat_drained: int = 100_000
    flat_passed: tuple[int, int] = (100_000, 2_000_000)
    settles: int = 15_000
    settles_at_an_end: int = 1_500
    #: Half messages without a verdict; and a few of them.
    halves: int = 500_000
    few_halves: int = 1_000
    half_drained: int = 40_000
    half_turns: int = 5
    extracted: int = 1_000_000
    #: By calls side by side, and by several processes.
    shared: int = 5_000
    #: By consumers: by one, by eight processes, with a transaction each, and one in a hundred.
    consumed: int = 300_000
    shared_consumed: int = 4_000
    booked: int = 1_000
    filtered: int = 500_000
    #: To a real destination; to one that takes a hundred thousand a second more, so that the time to connect does not
    #: count.
    sent: int = 30_000
    sent_quickly: int = 200_000
    #: To a webhook, whose client needs a request for each.
    posted: int = 6_000
    #: By RocketMQ's client in Python, which needs a call for each, and two for a transaction.
    sent_by_client: int = 3_000
    ended_by_client: int = 1_500


FULL = Scale()

#: Shows that everything runs, and says nothing about speed.
QUICK = Scale(
    rounds=1,
    transactions=50,
    business_turns=1,
    business_seconds=0.1,
    warm_up_seconds=0.05,
    imports=1,
    drained=3_000,
    drained_pinned=3_000,
    passed=3_000,
    latency_messages=25,
    random_seconds=0.5,
    writer_seconds=5.0,
    trouble_seconds=1.0,
    troubled=1_000,
    unknown_topics=100,
    flat_drained=2_000,
    flat_passed=(1_000, 4_000),
    settles=400,
    settles_at_an_end=40,
    halves=2_000,
    few_halves=100,
    half_drained=2_000,
    half_turns=1,
    extracted=5_000,
    shared=400,
    consumed=3_000,
    shared_consumed=800,
    booked=200,
    filtered=3_000,
    sent=600,
    sent_quickly=600,
    posted=600,
    sent_by_client=200,
    ended_by_client=100,
)


@dataclass(slots=True)
class Turns:
    """Keeps the figures of two sides, which are taken in turn: ours, the other's, ours, the other's."""

    name: str
    ours: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    def add(self, ours: float, other: float) -> None:
        """Note a round."""
        self.ours.append(ours)
        self.other.append(other)
        say(f"{self.name}: {ours:,.1f} against {other:,.1f}, {ours / other:.2f}")


def say(text: str) -> None:
    """Show progress, away from the table."""
    print(text, file=sys.stderr, flush=True)
