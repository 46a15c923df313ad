"""Leases as values: what for, whose, and which may be taken."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class Partition:
    """What a lease is for."""

    subscription: str
    generation: int = 1
    partition: int = 0

    @property
    def parameters(self) -> dict[str, object]:
        """The key of its rows."""
        return {"subscription": self.subscription, "generation": self.generation, "partition": self.partition}


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to a partition, under an epoch that nobody else will ever have."""

    partition: Partition
    epoch: int
    owner: str

    @property
    def parameters(self) -> dict[str, object]:
        """The key of its row, and the epoch that a write has to match."""
        return {**self.partition.parameters, "epoch": self.epoch}


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, as others see it.

    `length`: for how long the holder takes it each time; None where that was not written. `notice`: why a worker that
    wants to work does not, as it said itself at `noticed_at`; removed by the next one that does.
    """

    owner: str | None
    epoch: int
    renewals: int
    lease_until: datetime | None
    live: bool
    length: timedelta | None = None
    notice: str | None = None
    noticed_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Which lease may be taken, besides one that was given back or is the taker's own.

    `expired`: only one that has expired by the clock of the database. `seen`: only one that is as it was seen.
    """

    expired: bool = True
    seen: Holder | None = None


#: Any lease that has expired.
EXPIRED = Claim()
