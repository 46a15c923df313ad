"""Growth over time: two windows of a series of figures are compared, both after a warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: A figure, and the second at which it was taken.
Series = Sequence[tuple[float, float]]
#: Fewer figures have no quarters.
_LEAST = 4


@dataclass(frozen=True, slots=True)
class Change:
    """The peaks of the two windows of a series."""

    before: float
    after: float

    def is_growth(self, *, share: float, more: float) -> bool:
        """Return whether the second is above the first by more than a share of it, and `more`."""
        return self.after > self.before * (1 + share) + more

    def __str__(self) -> str:
        return f"{self.before:.0f} -> {self.after:.0f}"


def changes(series: Mapping[str, Series], least_seconds: float) -> dict[str, Change]:
    """Return the change of each series; one that took less than `least_seconds` tells nothing, and is left out."""
    return {
        name: _change(each) for name, each in series.items() if len(each) >= _LEAST and _lasted(each) >= least_seconds
    }


def _lasted(series: Series) -> float:
    return series[-1][0] - series[0][0]


def _change(series: Series) -> Change:
    """Compare the third quarter with the last one; the first half is the warm-up."""
    figures = [figure for _, figure in series]
    half, last = len(figures) // 2, len(figures) * 3 // 4
    return Change(max(figures[half:last]), max(figures[last:]))
