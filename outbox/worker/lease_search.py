"""The search for leases: the holders, the share of a worker, and the free leases. Nothing here waits."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta

from outbox.errors import LeaseLostError
from outbox.model.barrier import has_arrived
from outbox.model.lease import Holder, Lease, Partition
from outbox.model.shares import fair_shares
from outbox.model.subscription import Subscription
from outbox.runtime.clock import clock
from outbox.runtime.named import named
from outbox.runtime.text import counted
from outbox.store.database import Channel
from outbox.store.subscriptions.leases import Leases, LeaseWatch
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.store.subscriptions.workers import LiveWorkers
from outbox.worker.notice import Notice

#: Says which worker works and which stands by. A logger of its own, because many people want to see these lines and
#: few others.
lease_logger = logging.getLogger("outbox.lease")


class LeaseSearch:
    """Looks for the leases of one subscription, over all connections of a worker."""

    def __init__(self, subscription: str, length: timedelta, notice: Notice, *, attempts: int) -> None:
        """`length`: for how long a lease is taken each time, and a worker counts as alive.

        `attempts`: so many failures of a message the worker allows.
        """
        #: The partitions that this worker is to have.
        self.own: set[Partition] = set()
        self._subscription = subscription
        self._length, self._attempts = length, attempts
        self._notice = notice
        self._watches: dict[Partition, LeaseWatch] = {}
        #: Of the last look.
        self._holders: Mapping[Partition, Holder] = {}
        self._claims: dict[Partition, Holder | None] = {}
        self._stands_by = self._lengths_differ = self._is_known = False
        self._told: tuple[int, int, int] | None = None

    @staticmethod
    def pause() -> float:
        """Return for how many seconds to wait between two looks."""
        return random.uniform(0.2, 0.4)

    def look(self, channel: Channel, stored: Subscription, owner: str, *, alone: bool) -> set[Partition] | None:
        """Look who holds the leases, and which of them this worker is to have; each look counts for the claims.

        `alone`: the worker is to have all.

        Returns:
            The partitions that have come to where all are to meet, and were given back. None: there are new partitions.

        Raises:
            LeaseLostError: the subscription was dropped.
        """
        partitions = stored.all_partitions()
        self._holders = Leases(channel).look_all(partitions)
        watches = {each: self._watches.get(each) or LeaseWatch(self._length) for each in self._holders}
        self._claims = {each: watch.look(self._holders[each]) for each, watch in watches.items()}
        self._watches = watches
        for holder in self._holders.values():
            self._notice.seen(holder.notice)
        met = self._met(channel, stored)
        if self._has_changed(channel, stored, met):
            return None
        self.own = set(partitions) if alone or len(partitions) == 1 else self._share(channel, partitions, owner)
        return met

    def take(self, channel: Channel, wanted: Collection[Partition], owner: str) -> dict[Lease, float]:
        """Take the leases that were free at the last look; return each with a moment before."""
        leases, taken = Leases(channel), dict[Lease, float]()
        for partition in wanted:
            holder, before = self._holders[partition], clock()
            claim = self._claims[partition]
            # A lease in other hands is not tried, because that would be a write at each look.
            is_open = not holder.wanted and (claim is not None or holder.leaves_to(owner))
            lease = None
            if is_open:
                lease = leases.acquire(partition, owner, self._length, claim, attempts=self._attempts)
            if lease is None:
                self._say_that_it_stands_by(holder)
                continue
            if self._stands_by:
                self._stands_by = False
                about = named("lease_taken", subscription=self._subscription)
                lease_logger.info("%s: the lease is free; taking over", self._subscription, extra=about)
            taken[lease] = before
        return taken

    def sign_off(self, channel: Channel, owner: str) -> None:
        """Tell other workers that the worker stops, so that they take the partitions soon."""
        if self._is_known:
            self._is_known = False
            with suppress(Exception):
                LiveWorkers(channel, self._subscription).gone(owner)

    def _met(self, channel: Channel, stored: Subscription) -> set[Partition]:
        if stored.stop_at is None:
            return set()
        standing = zip(stored.all_partitions(), ProgressLog(channel).standing(stored), strict=True)
        arrived = {partition for partition, progress in standing if has_arrived(progress, stored.stop_at)}
        if stored.kind == "backfill":
            arrived = {each for each in arrived if not Parked(channel, stored.name, each).some()}
        return {each for each in arrived if each in self._holders and self._holders[each].owner is None}

    def _has_changed(self, channel: Channel, stored: Subscription, met: Collection[Partition]) -> bool:
        """Return whether the subscription has new partitions; if all have met, the next ones begin."""
        if len(self._holders) == stored.partitions:
            all_met = len(met) == stored.partitions
            changed = all_met and Subscriptions(channel).begin_next_generation(stored.name)
            if changed and stored.kind == "backfill":
                about = named("backfill_ended", subscription=stored.name)
                lease_logger.info("%s has come to its end", stored.name, extra=about)
            return changed
        found = Subscriptions(channel).find(stored.name)
        if stored.kind == "backfill" and found is None:
            return True  # another worker has brought it to its end
        if found is None or found.generation == stored.generation:
            raise LeaseLostError(f"subscription {stored.name!r} was dropped")
        return True

    def _share(self, channel: Channel, partitions: Collection[Partition], owner: str) -> set[Partition]:
        """Tell other workers that the worker is alive; return the share among all live workers."""
        workers = LiveWorkers(channel, self._subscription)
        workers.seen(owner)
        self._is_known = True
        live = workers.live(self._length) | {owner}
        dealt = fair_shares([self._holders[each].owner for each in partitions], live)
        share = {partition for partition, worker in zip(partitions, dealt, strict=True) if worker == owner}
        numbers = len(share), len(partitions), len(live) - 1
        if self._told != numbers:
            self._told = numbers
            text = "%s: a share of %d of %d partitions, beside %s"
            others, about = counted(numbers[2], "other worker"), named("lease_share", subscription=self._subscription)
            lease_logger.info(text, self._subscription, *numbers[:2], others, extra=about)
        return share

    def _say_that_it_stands_by(self, holder: Holder) -> None:
        """Log that this worker stands by; only once, over any number of lost connections."""
        if not self._stands_by:
            self._stands_by = True
            about = named("lease_awaited", subscription=self._subscription)
            why = standing_by(holder, holder.length or self._length)
            lease_logger.info("%s: %s", self._subscription, why, extra=about)
        # A lease that was given back keeps its length; and a command has a length of its own.
        is_worker = holder.owner is not None and not holder.is_command
        theirs, ours = ((each or self._length).total_seconds() for each in (holder.length, self._length))
        # Stored in milliseconds.
        if is_worker and abs(theirs - ours) >= 0.001 and not self._lengths_differ:
            self._lengths_differ = True
            text = "%s: the lease of the other worker is %g s long, that of this worker %g s; give both the same length"
            lease_logger.warning(text, self._subscription, theirs, ours)


def standing_by(holder: Holder, watched: timedelta) -> str:
    """Return in words why a worker stands by; `watched`: the time until a lease that was not given back is taken."""
    if holder.live:
        return "another worker holds the lease; standing by"
    if holder.wanted:
        return "a command wants the lease; standing by"
    seconds = watched.total_seconds()
    return f"the lease has run out and was not given back; standing by until nobody renews it for {seconds:g} s"
