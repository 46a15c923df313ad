"""Leases as values: the partition, its lease, and the holder of the lease."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of a subscription, which a worker leases. `Subscription.partition` makes it.

    `partitions`: how many the subscription has. Of the slots of keys it owns each `partitions`-th one.
    """

    subscription: str
    generation: int = 1
    partition: int = 0
    partitions: int = 1

    def owns(self, slot: int) -> bool:
        """Return whether the messages of this slot belong to the partition."""
        return slot % self.partitions == self.partition

    @property
    def parameters(self) -> dict[str, object]:
        """The key of its rows."""
        return {"subscription": self.subscription, "generation": self.generation, "partition": self.partition}


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to a partition, under an epoch that no other holder of it ever gets."""

    partition: Partition
    epoch: int
    owner: str

    def follows(self, other: Lease) -> bool:
        """Return whether nobody had the partition between the other lease and this one."""
        return self.partition == other.partition and self.epoch == other.epoch + 1

    @property
    def parameters(self) -> dict[str, object]:
        """The key of its row, and the epoch that a write has to match."""
        return {**self.partition.parameters, "epoch": self.epoch}


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lease, as others see it.

    `length`: for how long the holder takes it each time; None where that was not written. `notice`: the reason why a
    worker that wants to work does not, as it wrote itself at `noticed_at`. The next worker that works removes it.
    `wanted`: a command waits for the lease, so the holder gives it back, and no other worker takes it.
    """

    owner: str | None
    epoch: int
    renewals: int
    lease_until: datetime | None
    live: bool
    length: timedelta | None = None
    notice: str | None = None
    noticed_at: datetime | None = None
    wanted: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """A lease as one sees it who wants it: its holder, and since when it has stood still, by the clock of that one."""

    holder: Holder
    since: float

    @classmethod
    def of(cls, holder: Holder, now: float, last: Sight | None) -> Sight:
        """Return what is seen now. `last`: what was seen before; it lasts while nobody takes or renews the lease."""
        if last is not None and (holder.epoch, holder.renewals) == (last.holder.epoch, last.holder.renewals):
            return last
        return cls(holder, now)

    def stood_still(self, now: float, length: timedelta) -> bool:
        """Return whether nobody has renewed the lease for the length for which its holder takes it.

        `length`: counts for a holder that has not written its own.
        """
        return now - self.since > (self.holder.length or length).total_seconds()
