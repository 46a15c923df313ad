"""Fair shares: the deal of a subscription's partitions among its live workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence


def fair_shares(owners: Sequence[str | None], workers: Collection[str]) -> tuple[str | None, ...]:
    """Deal the partitions out evenly among live workers; return the future worker of each partition.

    Workers that read the same leases come to the same deal, without asking each other. No two shares differ by more
    than one partition. A partition moves only if its owner is not alive, or has more than its share.

    Args:
        owners: the owner of each partition, as its lease says; None: nobody.
        workers: the live workers. Without any, nobody gets a partition.
    """
    held = Counter(owner for owner in owners if owner in workers)
    # The workers with the most partitions get the larger shares, so that the fewest partitions move.
    ranked = sorted(workers, key=lambda worker: (-held[worker], worker))
    room = {worker: (len(owners) + len(ranked) - 1 - rank) // len(ranked) for rank, worker in enumerate(ranked)}
    dealt: list[str | None] = []
    for owner in owners:
        keeps = owner is not None and room.get(owner, 0) > 0
        dealt.append(owner if keeps else None)
        if keeps and owner is not None:
            room[owner] -= 1
    waiting = (worker for worker in sorted(room) for _ in range(room[worker]))
    return tuple(next(waiting, None) if worker is None else worker for worker in dealt)
