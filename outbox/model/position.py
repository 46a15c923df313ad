"""Positions and windows: the settled part of the log at a moment, and the commits between two moments.

Every row of the log carries a number that tells whether the row is settled: its transaction id on PostgreSQL, its own
id elsewhere. The algebra below is the same for both, and knows neither SQL nor a driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from outbox.errors import PositionError


@dataclass(frozen=True, slots=True)
class Position:
    """A position: at its moment every number below `head` had been settled, except the numbers in `open`."""

    head: int
    open: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.head < 0:
            raise PositionError(f"a position needs a head of at least 0, not {self.head}")
        if any(a >= b for a, b in zip(self.open, self.open[1:], strict=False)):
            raise PositionError(f"the open numbers of a position must rise: {self.open}")
        if self.open and not (0 <= self.open[0] and self.open[-1] < self.head):
            raise PositionError(f"the open numbers {self.open} must lie below the head {self.head}")

    @classmethod
    def of(cls, head: int, open: Iterable[int] = ()) -> Self:
        """Return a position from open numbers in any order; numbers not below `head` are left out."""
        return cls(head, tuple(sorted({n for n in open if n < head})))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `xmin:head:open,open,…`, the text form of PostgreSQL's `pg_snapshot`."""
        try:
            _, head, listed = text.split(":")
            return cls.of(int(head), map(int, listed.split(",")) if listed else ())
        except ValueError as error:
            raise PositionError(f"not a position: {text!r}; the form is xmin:head:open,open,…") from error

    def __str__(self) -> str:
        floor = self.open[0] if self.open else self.head
        return f"{floor}:{self.head}:{','.join(map(str, self.open))}"

    def sees(self, n: int) -> bool:
        """Return whether number `n` was settled at this position."""
        return n < self.head and n not in self.open

    def union(self, other: Self) -> Self:
        """Return the smallest position that sees all numbers of both positions."""
        head = max(self.head, other.head)
        return type(self).of(head, (n for n in {*self.open, *other.open} if not (self.sees(n) or other.sees(n))))


EARLIEST = Position(0)


@dataclass(frozen=True, slots=True)
class Window:
    """The commits after `base` and not after `target`. A window never changes."""

    base: Position
    target: Position

    def holds(self, n: int) -> bool:
        """Return whether number `n` was settled between the two positions."""
        return self.target.sees(n) and not self.base.sees(n)

    @property
    def late(self) -> tuple[int, ...]:
        """Numbers that were open at the base and have been settled since."""
        return tuple(n for n in self.base.open if self.target.sees(n))

    @property
    def fresh(self) -> tuple[int, int]:
        """The range [first, end) of numbers above the base; the numbers in `target.open` do not belong to it."""
        return self.base.head, max(self.base.head, self.target.head)

    @property
    def fresh_open(self) -> tuple[int, ...]:
        """Numbers inside the fresh range that are not settled yet."""
        return tuple(n for n in self.target.open if n >= self.base.head)

    def overlaps(self, seen: Position) -> bool:
        """Return whether the window holds a number that another position sees, such as the position of a purge."""
        if any(seen.sees(n) for n in self.late):
            return True
        first, end = self.base.head, min(self.target.head, seen.head)
        excepted = {n for n in (*self.target.open, *seen.open) if first <= n < end}
        return end - first > len(excepted)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a partition: all that `base` sees is done, and the ids up to `after` in the open window.

    The open window lies between `base` and `target`; without a `target` no window is open.
    """

    base: Position
    target: Position | None = None
    after: int | None = None

    def __post_init__(self) -> None:
        if (self.target is None) != (self.after is None):
            raise PositionError("progress inside a window needs both the target and the last id")

    def passes(self, n: int, id: int) -> bool:
        """Return whether the message with number `n` and this id is settled."""
        if self.target is None or self.after is None:
            return self.base.sees(n)
        return self.base.sees(n) or (id <= self.after and self.target.sees(n))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The position of now, with the incarnation and the clock of the server."""

    position: Position
    incarnation: str
    now: datetime
