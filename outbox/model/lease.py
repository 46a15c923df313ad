"""Leases as values: the partition, its lease, and the holder of the lease."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of a subscription, which a worker leases; made by `Subscription.partition`.

    `partitions`: how many partitions the subscription has. Each owns every `partitions`-th slot.
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
        """The key of the partition's rows."""
        return {"subscription": self.subscription, "generation": self.generation, "partition": self.partition}


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to a partition, under an epoch of this owner: epochs begin anew when a subscription was dropped."""

    partition: Partition
    epoch: int
    owner: str

    def follows(self, other: Lease) -> bool:
        """Return whether nobody had the partition between the `other` lease and this lease."""
        return self.partition == other.partition and self.epoch == other.epoch + 1

    @property
    def parameters(self) -> dict[str, object]:
        """The key of the lease's row, and the epoch and owner that a write has to match."""
        return {**self.partition.parameters, "epoch": self.epoch, "owner": self.owner}


#: The names of commands begin with it; the names of workers begin with their host, and contain a colon.
COMMAND = "command-"


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lease, as others see the holder.

    `length`: for how long the holder takes the lease each time; None where no length is stored. `notice`: the reason,
    written at `noticed_at`, why a worker that wants to work does not; the next working worker removes the notice.
    `wanted`: a command waits for the lease: the holder gives the lease back, and no other worker takes it. `version`:
    of the holder's library. `since`: when the holder took the lease first; None for both: the lease was given back.
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
    version: str | None = None
    since: datetime | None = None

    def leaves_to(self, owner: str) -> bool:
        """Return whether the lease was given back, or is this owner's."""
        return self.lease_until is None or self.owner == owner

    @property
    def is_command(self) -> bool:
        """True when a command has borrowed the lease."""
        return self.owner is not None and self.owner.startswith(COMMAND) and ":" not in self.owner


@dataclass(frozen=True, slots=True)
class Sight:
    """A wanted lease as seen by whoever waits: its holder, and since when it has stood still, by the waiter's clock."""

    holder: Holder
    since: float

    @classmethod
    def of(cls, holder: Holder, now: float, last: Sight | None) -> Sight:
        """Return the sight now. `last`: the sight before, which lasts while nobody takes or renews the lease."""
        if last is not None and (holder.epoch, holder.renewals) == (last.holder.epoch, last.holder.renewals):
            return last
        return cls(holder, now)

    def stood_still(self, now: float, length: timedelta) -> bool:
        """Return whether nobody has renewed the lease for its holder's length.

        `length`: counts for a holder without a stored length.
        """
        return now - self.since > (self.holder.length or length).total_seconds()
