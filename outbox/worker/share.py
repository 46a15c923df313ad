"""Shares: the partitions of a subscription that a worker is to have, among all workers that are alive."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from outbox.model.lease import Holder, Partition
from outbox.model.shares import fair_shares
from outbox.model.subscription import Subscription
from outbox.store.database import Channel
from outbox.store.subscriptions.workers import LiveWorkers

lease_logger = logging.getLogger("outbox.lease")


class Share:
    """The share of one worker in the partitions of one subscription, over all connections of the worker."""

    def __init__(self, subscription: str, alive: timedelta) -> None:
        """`alive`: for how long a worker counts as alive after it was seen."""
        self._subscription = subscription
        self._alive = alive
        self._told: tuple[int, int, int] | None = None
        self._is_known = False

    def look(
        self, channel: Channel, stored: Subscription, holders: Mapping[Partition, Holder], owner: str
    ) -> set[Partition]:
        """Tell the others that this worker is alive; return the partitions that it is to have.

        `holders`: who holds the leases now.
        """
        partitions = stored.all_partitions()
        if len(partitions) == 1:
            return set(partitions)
        workers = LiveWorkers(channel, self._subscription)
        workers.seen(owner)
        self._is_known = True
        live = workers.live(self._alive) | {owner}
        dealt = fair_shares([holders[each].owner if each in holders else None for each in partitions], live)
        share = {partition for partition, worker in zip(partitions, dealt, strict=True) if worker == owner}
        self._tell(len(share), len(partitions), len(live))
        return share

    def leave(self, channel: Channel, owner: str) -> None:
        """Tell the others that this worker stops, so that they take its partitions as soon as it gives them back."""
        if self._is_known:
            self._is_known = False
            with suppress(Exception):
                LiveWorkers(channel, self._subscription).gone(owner)

    def _tell(self, share: int, partitions: int, workers: int) -> None:
        """Log how large the share is, when that has changed."""
        if self._told != (share, partitions, workers):
            self._told = (share, partitions, workers)
            text = "%s: a share of %d of %d partitions, beside %d other workers"
            lease_logger.info(text, self._subscription, share, partitions, workers - 1)
