"""Growth over time: two windows of a series of figures are compared, the first one after a warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: A figure, and the second at which it was taken.
Series = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Change:
    """The medians of the two windows of a series."""

    before: float
    after: float

    def is_growth(self, *, share: float, more: float) -> bool:
        """Return whether the second is above the first by more than a share of it, and `more`."""
        return self.after > self.before * (1 + share) + more

    def __str__(self) -> str:
        return f"{self.before:.0f} -> {self.after:.0f}"


def changes(series: Mapping[str, Series], least_seconds: float) -> dict[str, Change]:
    """Return the change of each series; one of less than `least_seconds` tells nothing, and is left out."""
    return {name: _change(each) for name, each in series.items() if _seconds(each) >= least_seconds}


def _seconds(series: Series) -> float:
    return series[-1][0] - series[0][0] if series else 0.0


def _change(series: Series) -> Change:
    """Compare the third quarter with the last one; the first half is the warm-up."""
    begin, quarter = series[0][0], _seconds(series) / 4
    before = [figure for at, figure in series if begin + 2 * quarter <= at < begin + 3 * quarter]
    after = [figure for at, figure in series if begin + 3 * quarter <= at]
    return Change(median(before), median(after))
