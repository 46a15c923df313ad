"""Growth over time: two windows of a series of figures are compared, the first one after a warm-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

#: A figure, and the second at which it was taken.
Series = Sequence[tuple[float, float]]


def grown(series: Mapping[str, Series], *, least_seconds: float, share: float, more: float) -> dict[str, str]:
    """Return the series that have grown between the windows by more than a share of what they were, and `more`.

    A series of less than `least_seconds` tells nothing, and is left out.
    """
    compared = {name: _windows(each) for name, each in series.items() if _seconds(each) >= least_seconds}
    return {
        name: f"{before:.0f}, then {after:.0f}"
        for name, (before, after) in compared.items()
        if after > before * (1 + share) + more
    }


def lasting(series: Mapping[str, Series], least_seconds: float) -> list[str]:
    """Return the names of the series that are long enough to be compared."""
    return [name for name, each in series.items() if _seconds(each) >= least_seconds]


def _seconds(series: Series) -> float:
    return series[-1][0] - series[0][0] if series else 0.0


def _windows(series: Series) -> tuple[float, float]:
    """Return the medians of the third and of the last quarter; the first half is the warm-up."""
    begin, quarter = series[0][0], _seconds(series) / 4
    before = [figure for at, figure in series if begin + 2 * quarter <= at < begin + 3 * quarter]
    after = [figure for at, figure in series if begin + 3 * quarter <= at]
    return median(before), median(after)
