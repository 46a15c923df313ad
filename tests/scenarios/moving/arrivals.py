"""What arrives at a destination, as its relays write it down, and a judge of a move from one to another."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """A message of a key, with its number in it; `at`: when it arrived, by a clock that all processes share."""

    at: int
    key: str
    number: int

    @property
    def line(self) -> str:
        """The arrival as a line of a file."""
        return f"{self.at} {self.key} {self.number}\n"


def arrivals(path: Path) -> list[Arrival]:
    """What has arrived, in its order. The last line may be half written."""
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    lines = whole.splitlines()
    return [Arrival(int(at), key, int(number)) for at, key, number in map(str.split, lines)]


def arrived(path: Path) -> int:
    """How many have arrived."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def faults(written: Iterable[tuple[str, int]], old: Sequence[Arrival], new: Sequence[Arrival]) -> dict[str, int]:
    """What is wrong with a move, by name and number; nothing, if it left no gap."""
    came = Counter((each.key, each.number) for each in (*old, *new))
    wanted = set(written)
    found = {
        "lost": len(wanted - came.keys()),
        "phantom": len(came.keys() - wanted),
        "twice": sum(number > 1 for number in came.values()),
        "overtaken": sum(numbers != sorted(numbers) for numbers in _by_key([*old, *new]).values()),
        "late": _late(old, new),
    }
    return {name: number for name, number in found.items() if number}


def _by_key(found: Iterable[Arrival]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = defaultdict(list)
    for each in found:
        numbers[each.key].append(each.number)
    return numbers


def _late(old: Sequence[Arrival], new: Sequence[Arrival]) -> int:
    """Return how many arrived at the old destination after one of their key had arrived at the new one."""
    first = {each.key: each.at for each in sorted(new, reverse=True)}
    return sum(each.at > first[each.key] for each in old if each.key in first)
