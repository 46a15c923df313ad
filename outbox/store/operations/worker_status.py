"""The status of workers: which process works for which partitions, and when each has settled last."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from outbox.model.lease import Holder, Partition
from outbox.model.status import WorkerStatus
from outbox.model.subscription import Subscription
from outbox.runtime.process import parts_of_name
from outbox.store.database import Channel
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.workers import LiveWorkers

#: A worker that stands by writes that it is alive at each look, several times a second.
_SEEN = timedelta(seconds=10)


def workers(channel: Channel, subscriptions: Sequence[Subscription]) -> list[WorkerStatus]:
    """Return the workers with a live lease, and those that stand by, by subscription and name.

    Of a subscription with one partition nobody who stands by is known.
    """
    return [worker for each in subscriptions for worker in _of(channel, each)]


def _of(channel: Channel, subscription: Subscription) -> list[WorkerStatus]:
    held: dict[str, list[tuple[Partition, Holder]]] = {}
    for partition, holder in Leases(channel).look_all(subscription.all_partitions()).items():
        if holder.live and holder.owner is not None and not holder.is_command:
            held.setdefault(holder.owner, []).append((partition, holder))
    names = {*held, *LiveWorkers(channel, subscription.name).live(_SEEN)}
    return [_worker(channel, subscription, name, held.get(name, [])) for name in sorted(names)]


def _worker(
    channel: Channel, subscription: Subscription, name: str, held: Sequence[tuple[Partition, Holder]]
) -> WorkerStatus:
    host, process = parts_of_name(name)
    settles = (_last_settle(channel, *each) for each in held)
    return WorkerStatus(
        name=name,
        host=host,
        process=process,
        version=next((holder.version for _, holder in held if holder.version is not None), None),
        since=min((holder.since for _, holder in held if holder.since is not None), default=None),
        subscription=subscription.name,
        partitions=tuple(sorted(partition.partition for partition, _ in held)),
        partitions_in_all=subscription.partitions,
        lease_until=min((holder.lease_until for _, holder in held if holder.lease_until is not None), default=None),
        last_settle_at=max((each for each in settles if each is not None), default=None),
        notice=next((holder.notice for _, holder in held if holder.notice is not None), None),
    )


def _last_settle(channel: Channel, partition: Partition, holder: Holder) -> datetime | None:
    newest = ProgressLog(channel).newest(partition)
    return None if newest is None or newest.epoch != holder.epoch else newest.settled_at
