"""The search for leases: looks who holds those that a worker wants, and takes the free ones. It never waits."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Mapping
from datetime import timedelta

from outbox.model.lease import Holder, Lease, Partition
from outbox.runtime.clock import clock
from outbox.store.database import Channel
from outbox.store.subscriptions.leases import Leases, LeaseWatch
from outbox.worker.notice import Notice

#: Says which worker works and which stands by. A logger of its own, because many people want to see these lines and
#: few others.
lease_logger = logging.getLogger("outbox.lease")


class LeaseSearch:
    """Looks for the leases of one subscription, over all connections of a worker."""

    def __init__(self, subscription: str, length: timedelta, notice: Notice) -> None:
        """`length`: for how long a lease is taken each time."""
        self._subscription = subscription
        self._length = length
        self._notice = notice
        self._watches: dict[Partition, LeaseWatch] = {}
        #: Of the last look.
        self._holders: Mapping[Partition, Holder] = {}
        self._claims: dict[Partition, Holder | None] = {}
        self._stands_by = self._leases_differ = False

    @staticmethod
    def pause() -> float:
        """Return for how many seconds to wait between two looks."""
        return random.uniform(0.2, 0.4)

    def look(self, channel: Channel, partitions: Collection[Partition]) -> Mapping[Partition, Holder]:
        """Return who holds these leases, as far as they are there; each look counts for the claims of `take`."""
        self._holders = Leases(channel).look_all(partitions)
        watches = {each: self._watches.get(each) or LeaseWatch(self._length) for each in self._holders}
        self._claims = {each: watch.look(self._holders[each]) for each, watch in watches.items()}
        self._watches = watches
        for holder in self._holders.values():
            self._notice.seen(holder.notice)
        return self._holders

    def take(self, channel: Channel, wanted: Collection[Partition], owner: str) -> dict[Lease, float]:
        """Take the leases that were free at the last look; return each with a moment before it was taken."""
        leases, taken = Leases(channel), dict[Lease, float]()
        for partition in wanted:
            holder, before = self._holders[partition], clock()
            claim = self._claims[partition]
            lease = None if holder.wanted else leases.acquire(partition, owner, self._length, claim)
            if lease is not None:
                self._say_that_it_takes_over()
                taken[lease] = before
            else:
                self._say_that_it_stands_by(holder)
        return taken

    def _say_that_it_stands_by(self, holder: Holder) -> None:
        """Log that this worker stands by; only once, over any number of lost connections."""
        if not self._stands_by:
            self._stands_by = True
            watched = (holder.length or self._length).total_seconds()
            held = "another worker holds the lease; standing by"
            left = f"the lease has run out and was not given back; standing by until nobody renews it for {watched:g} s"
            lease_logger.info("%s: %s", self._subscription, held if holder.live else left)
        differs = bool(holder.renewals) and not holder.is_command and holder.length != self._length
        if differs and holder.length is not None and not self._leases_differ:
            self._leases_differ = True
            here = f"that of the worker which stands by {self._length.total_seconds():g} s"
            differ = f"its lease is {holder.length.total_seconds():g} s long, {here}; give both the same --lease"
            lease_logger.warning("%s: %s", self._subscription, differ)
            self._notice.write(differ)

    def _say_that_it_takes_over(self) -> None:
        if self._stands_by:
            self._stands_by = False
            lease_logger.info("%s: the lease is free; taking over", self._subscription)
