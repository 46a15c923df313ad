"""The plan of a soak: a list of timed actions, pure data. The same seed and the same length give the same plan."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Literal

#: The processes of each kind.
RELAYS, WRITERS = 3, 4
#: The number of partitions of each subscription at the beginning, and the numbers that it may get later.
PARTITIONS, OTHER_PARTITIONS = 8, (1, 2, 3, 5, 8)

#: The actions of one lane come one after the other; those of different lanes overlap.
Lane = Literal["relays", "writers", "postgresql", "nats", "kafka", "commands"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Action:
    """An action, `at` seconds after the beginning. One that lasts is undone after `seconds`.

    `number`: which of the processes of its lane it concerns; which of two ways a command takes; how many partitions.
    """

    at: float
    lane: Lane
    kind: str
    number: int = 0
    seconds: float = 0.0


#: The kinds of each lane, with their shares.
#: kill: SIGKILL. worst: a relay dies when it has sent a batch and not settled it. stop: SIGSTOP, then SIGCONT.
#: end: SIGTERM. fast, immediate: PostgreSQL is restarted. backend: one of its backends is killed, and the server
#: recovers. refuse: a proxy refuses connections. silence: the proxy passes nothing on. cut: the proxy loses an answer.
#: purge, grace, partitions: commands that delete what is old, alter a policy, and change the number of partitions.
#: dead: the destinations refuse some messages for a while; then some dead letters are discarded, and the others are
#: replayed.
KINDS: Mapping[Lane, Mapping[str, int]] = MappingProxyType(
    {
        "relays": {"kill": 3, "worst": 3, "stop": 3, "end": 1},
        "writers": {"kill": 1, "stop": 2},
        "postgresql": {"fast": 1, "immediate": 1, "backend": 1, "stop": 1},
        "nats": {"kill": 1, "stop": 1, "refuse": 1, "silence": 1, "cut": 1},
        "kafka": {"kill": 1, "stop": 1, "refuse": 1, "silence": 1, "cut": 1},
        "commands": {"purge": 1, "grace": 1, "dead": 1, "partitions": 3},
    }
)
#: Commands that come with a restart of all relays. split: topics get a subscription of their own. move: a subscription
#: goes to the other destination.
DEPLOYMENTS = ("split", "move")
#: The least and the most seconds between two actions of a lane.
_PAUSES: Mapping[Lane, tuple[float, float]] = MappingProxyType(
    {
        "relays": (3.0, 8.0),
        "writers": (4.0, 10.0),
        "postgresql": (6.0, 16.0),
        "nats": (5.0, 12.0),
        "kafka": (5.0, 12.0),
        "commands": (1.0, 4.0),
    }
)
#: How long an action lasts. A stop and a silence may be longer than a lease.
_LASTING: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"kill": (0.2, 2.0), "stop": (0.5, 8.0), "refuse": (0.5, 4.0), "silence": (0.5, 8.0), "dead": (2.0, 5.0)}
)
#: In this share of the time every relay is killed and restarted. Afterwards the first relay is only stopped and
#: continued, so that the memory of one process can be compared over time.
RESTARTING = 0.4


def plan_of(seed: int, seconds: float) -> list[Action]:
    """Return the actions of a soak of this length, in the order of time."""
    lanes = (_actions(lane, random.Random(f"{seed}-{lane}"), seconds) for lane in KINDS)
    return sorted(chain.from_iterable(lanes))


def latest(action: Action, seconds: float) -> float:
    """Return the second after which an action that was delayed is left out."""
    ends_the_first_relay = action.lane == "relays" and action.number == 0 and action.kind != "stop"
    return seconds * (RESTARTING if ends_the_first_relay or action.kind in DEPLOYMENTS else 1.0)


def _actions(lane: Lane, chance: random.Random, seconds: float) -> Iterator[Action]:
    calm, restarting = _kinds(lane, chance), _restarting_kinds(lane, chance)
    at = chance.uniform(*_PAUSES[lane])
    while at < seconds:
        early = at < seconds * RESTARTING
        kind = next(restarting if early else calm)
        lasts = chance.uniform(*_LASTING[kind]) if kind in _LASTING else 0.0
        spared = 0 if early or kind == "stop" else 1
        number = {
            "relays": chance.randrange(spared, RELAYS),
            "writers": chance.randrange(WRITERS),
            "commands": chance.choice(OTHER_PARTITIONS) if kind == "partitions" else chance.randrange(2),
        }.get(lane, 0)
        yield Action(at=round(at, 2), lane=lane, kind=kind, number=number, seconds=round(lasts, 2))
        at += lasts + chance.uniform(*_PAUSES[lane])


def _restarting_kinds(lane: Lane, chance: random.Random) -> Iterator[str]:
    if lane != "commands":
        return _kinds(lane, chance)
    return chain(DEPLOYMENTS, _shuffled([*KINDS[lane], "move"], chance))


def _kinds(lane: Lane, chance: random.Random) -> Iterator[str]:
    return _shuffled([kind for kind, share in KINDS[lane].items() for _ in range(share)], chance)


def _shuffled(kinds: list[str], chance: random.Random) -> Iterator[str]:
    """Yield kinds without end. Each comes once before any comes again, so that none stays out for long."""
    while True:
        yield from chance.sample(kinds, len(kinds))
