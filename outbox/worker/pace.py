"""The pace of a slowed-down subscription: how many messages may be handed over now."""

from __future__ import annotations

from collections.abc import Callable

from outbox.model.lease import Partition
from outbox.model.subscription import Subscription
from outbox.runtime.clock import clock as now

#: Messages are handed over in portions of so many seconds, so that a call has more than one where the rate is high.
_PORTION_SECONDS = 0.1


class Pace:
    """Lets at most `rate` messages a second pass; time without messages is not made up for."""

    def __init__(self, rate: float, *, clock: Callable[[], float] = now) -> None:
        self.rate = rate
        self._clock = clock
        self._most = max(1.0, rate * _PORTION_SECONDS)
        self._free, self._at = self._most, clock()

    @property
    def free(self) -> int:
        """How many messages may be handed over now."""
        at = self._clock()
        self._free, self._at = min(self._most, self._free + (at - self._at) * self.rate), at
        return int(self._free)

    @property
    def free_in(self) -> float:
        """Seconds until there is a whole portion."""
        return max(0.0, self._most - self._free) / self.rate

    def spend(self, messages: int) -> None:
        """Note that so many messages are handed over."""
        self._free -= messages


class Paces:
    """The paces of a subscription's partitions, while people slow the subscription down."""

    def __init__(self) -> None:
        self._paces: dict[Partition, Pace] = {}

    def of(self, partition: Partition, stored: Subscription) -> Pace | None:
        """Return the pace of a partition: the one before, unless people have changed the rate; None: any."""
        if stored.pause is None or stored.pause.rate is None:
            return None
        # Each partition has its share, whoever holds the others.
        rate = stored.pause.rate / stored.partitions
        pace = self._paces.get(partition)
        if pace is None or pace.rate != rate:
            pace = self._paces[partition] = Pace(rate)
        return pace
