"""The barrier: where the partitions of a subscription meet before their number changes.

The number of partitions changes only while all partitions stand at the same progress, because a key may move from one
partition to another: the next generation begins there. Partitions that stand apart handle the log up to the position
`stop_at`, and wait there for the last partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from outbox.model.position import Position, Progress


def stop_at(standing: Sequence[Progress]) -> Position:
    """Return the first position at which these partitions can meet: it sees all settled and begun messages.

    No lease of the partitions may be held from the reading of their progress to the storing of the position.
    """
    return reduce(Position.union, (progress.target or progress.base for progress in standing))


def has_arrived(progress: Progress, stop: Position) -> bool:
    """Return whether a partition stands at the stop, and handles nothing more."""
    return progress == Progress(stop)


def next_generation(standing: Sequence[Progress]) -> Progress | None:
    """Return where each partition of the next generation begins; None while the partitions stand apart."""
    first, *others = standing
    return first if all(progress == first for progress in others) else None
