"""Finds the batch that settled a message, from the progress rows of a partition. Needs no Spark."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from outbox.model.position import EARLIEST, Position, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One settled batch of a partition: its place among the others, how far it came, and when it was settled."""

    epoch: int
    n: int
    progress: Progress
    settled_at: datetime


@dataclass(slots=True)
class _Pages:
    """The batches inside one window. `reached` holds the id up to which each of them came."""

    target: Position
    reached: list[int]
    batches: list[int]

    def find(self, number: int, id: int) -> int | None:
        if not self.target.sees(number):
            return None
        at = bisect_left(self.reached, id)
        return self.batches[at] if at < len(self.reached) else None


class Batches:
    """The batches of one partition, in their order.

    Messages that the first batch settled are in no batch, because it is not known what came before it. With `complete`
    they are in it, because it is the first batch that there ever was.
    """

    def __init__(self, batches: Sequence[Batch], *, complete: bool = False) -> None:
        kept = _since_the_last_step_back(batches)
        self.batches: Sequence[Batch] = kept
        self._first = 0 if complete and len(kept) == len(batches) else 1
        #: Per base, in their order: its head, the first batch that stored it, and the pages after it.
        self._heads: list[int] = []
        self._begun: list[int] = []
        self._pages: list[list[_Pages]] = []
        #: Numbers that were open at a base, with the first base that sees them.
        self._closed: dict[int, int] = {}
        self._open: frozenset[int] = frozenset()
        if kept:
            self._add_base(EARLIEST if self._first == 0 else kept[0].progress.base, 0)
        for at, batch in enumerate(kept):
            self._add(at, batch.progress)

    def find(self, number: int, id: int) -> Batch | None:
        """Return the batch that settled the message with this `number` and `id`; None: not known, or none did yet."""
        at = self.index(number, id)
        return None if at is None else self.batches[at]

    def index(self, number: int, id: int) -> int | None:
        """Return the index in `batches` of the batch that `find` returns; None as there."""
        at = self._index(number, id)
        return None if at is None or at < self._first else at

    @property
    def since(self) -> Position:
        """A position that sees none of the messages in these batches."""
        return EARLIEST if self._first == 0 or not self.batches else self.batches[0].progress.base

    def _index(self, number: int, id: int) -> int | None:
        base = self._base_that_sees(number)
        if base == 0:
            return None
        before = (len(self._heads) if base is None else base) - 1
        for pages in self._pages[before] if before >= 0 else ():
            found = pages.find(number, id)
            if found is not None:
                return found
        return None if base is None else self._begun[base]

    def _base_that_sees(self, number: int) -> int | None:
        """Return the first base that sees a number; None: none does."""
        if number in self._closed:
            return self._closed[number]
        if number in self._open:
            return None
        base = bisect_right(self._heads, number)
        return base if base < len(self._heads) else None

    def _add(self, at: int, progress: Progress) -> None:
        if (progress.base.head, frozenset(progress.base.open)) != (self._heads[-1], self._open):
            self._add_base(progress.base, at)
        if progress.target is None or progress.after is None:
            return
        pages = self._pages[-1]
        if not pages or pages[-1].target != progress.target:
            pages.append(_Pages(progress.target, [], []))
        pages[-1].reached.append(progress.after)
        pages[-1].batches.append(at)

    def _add_base(self, base: Position, at: int) -> None:
        still = frozenset(base.open)
        self._closed.update(dict.fromkeys(self._open - still, len(self._heads)))
        self._open = still
        self._heads.append(base.head)
        self._begun.append(at)
        self._pages.append([])


def _since_the_last_step_back(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Leave out batches from before a restore, because a restore sets positions back."""
    heads = [batch.progress.base.head for batch in batches]
    steps_back = [at for at in range(1, len(heads)) if heads[at] < heads[at - 1]]
    return batches[steps_back[-1] :] if steps_back else batches
