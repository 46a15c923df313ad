"""What the business processes of the crash suite do: transactions of every way, and where each process dies."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

#: "execute": a listener's way in the 4.x shape; the others are ways to a verdict.
Way = Literal["execute", "listener", "join", "record"]

#: After prepare, inside the local transaction, after its commit, before end. Of those that get there this share dies.
HALF_POINTS = ("half.after_prepare", "business.inside", "business.after_commit", "half.before_end")
DEATHS = 0.3
#: Where there is little room to die in, and at any moment.
ANYWHERE = "anywhere"
OTHER_POINTS = ("half.before_restore", "half.after_end", ANYWHERE)
_OTHER_DEATHS = 0.03

_COMMITS, _ENDS = 0.7, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """A transaction. `commits`: what its business does; `ends`: whether it says so afterwards.

    `slow`: where it takes longer than the checkers wait. `deaths`: the points at which its process dies, the one after
    a prepare at that of message `dies_after`.
    """

    number: int
    way: Way
    messages: int
    commits: bool
    ends: bool
    slow: Literal["before", "inside"] | None
    deaths: frozenset[str]
    dies_after: int

    @property
    def names(self) -> list[str]:
        """The bodies of its messages."""
        return [f"{self.number}-{place}" for place in range(self.messages)]


def act_of(seed: int, number: int, ways: tuple[Way, ...], slow: float) -> Act:
    """Return the transaction of this number; of all of them the share `slow` is slow."""
    chance = random.Random(f"{seed}-{number}")
    way = ways[number % len(ways)]
    messages = 1 if way == "execute" else chance.randint(1, 3)
    deaths = {point for point in HALF_POINTS if chance.random() < DEATHS}
    deaths |= {point for point in OTHER_POINTS if chance.random() < _OTHER_DEATHS}
    return Act(
        number=number,
        way=way,
        messages=messages,
        commits=chance.random() < _COMMITS,
        ends=chance.random() < _ENDS,
        slow=chance.choice(["before", "inside"]) if chance.random() < slow else None,
        deaths=frozenset(deaths),
        dies_after=chance.randrange(messages),
    )
