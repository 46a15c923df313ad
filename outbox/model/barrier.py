"""The barrier: where the partitions of a subscription meet before their number changes.

A subscription gets another number of partitions only while all of them stand at the same progress, because a key may
go from one partition to another: the next generation begins there. Partitions that stand apart handle the log up to
the position `stop_at`, and nothing after it, until all of them stand there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from outbox.model.position import Position, Progress


def stop_at(standing: Sequence[Progress]) -> Position:
    """Return the first position at which these partitions can meet: none has passed it.

    It sees all that one of them has settled or has begun. Nobody may hold a lease of the partitions between the reading
    of their progress and the storing of this position.
    """
    return reduce(Position.union, (progress.target or progress.base for progress in standing))


def has_arrived(progress: Progress, stop: Position) -> bool:
    """Return whether a partition stands at the position where all of them meet, and handles nothing more."""
    return progress == Progress(stop)


def next_generation(standing: Sequence[Progress]) -> Progress | None:
    """Return where each partition of the next generation begins; None while these do not stand at the same progress."""
    first, *others = standing
    return first if all(progress == first for progress in others) else None
