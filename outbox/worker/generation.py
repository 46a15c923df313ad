"""The generation of a subscription's partitions: notices that they are others by now, and begins the next one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from outbox.errors import LeaseLostError
from outbox.model.barrier import has_arrived
from outbox.model.lease import Holder, Partition
from outbox.model.subscription import Subscription
from outbox.store.database import Channel
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions


def met(channel: Channel, stored: Subscription, holders: Mapping[Partition, Holder]) -> set[Partition]:
    """Return the partitions that stand where all of them are to meet, and that were given back.

    `holders`: who holds the leases now.
    """
    if stored.stop_at is None:
        return set()
    standing = zip(stored.all_partitions(), ProgressLog(channel).standing(stored), strict=True)
    arrived = {partition for partition, progress in standing if has_arrived(progress, stored.stop_at)}
    return {partition for partition in arrived if partition in holders and holders[partition].owner is None}


def has_changed(
    channel: Channel, stored: Subscription, holders: Mapping[Partition, Holder], met: Collection[Partition]
) -> bool:
    """Return whether the subscription has other partitions now; if all have met, the next ones begin.

    Raises:
        LeaseLostError: the subscription was dropped.
    """
    if len(holders) == stored.partitions:
        all_met = len(met) == stored.partitions
        return all_met and Subscriptions(channel).begin_next_generation(stored.name)
    found = Subscriptions(channel).find(stored.name)
    if found is None or found.generation == stored.generation:
        raise LeaseLostError(f"subscription {stored.name!r} was dropped")
    return True
