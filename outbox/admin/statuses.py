"""The status of a subscription as a frozen result, from the stored status."""

from __future__ import annotations

from typing import Any

from outbox.admin.results import PartitionStatus, Status, TroubleStatus
from outbox.model.lease import Holder
from outbox.model.subscription import Subscription
from outbox.store.operations import status as stored
from outbox.store.operations.parked_status import Trouble
from outbox.store.subscriptions.holds import Hold

#: Fields of `StoredProperties` that are stored under the same name.
_SAME = ("name", "kind", "topics", "tags", "filter", "destination", "next_partitions", "pauses")


def status_of(standing: stored.SubscriptionStatus) -> Status:
    """Return the status of a subscription."""
    holder, subscription = standing.holder, standing.subscription
    return Status(
        **properties_of(subscription, standing.hold),
        backlog=standing.backlog.number,
        backlog_is_estimate=standing.backlog.about,
        lag_seconds=round(standing.lag, 3),
        lag_is_estimate=standing.lag_about,
        idle_seconds=rounded(standing.idle),
        worker=_owner(holder) if standing.is_run else None,
        partitions=tuple(map(_of_partition, standing.partitions)),
        live=standing.is_run,
        lease_until=None if holder is None else holder.lease_until,
        lease_seconds=None if holder is None or holder.length is None else holder.length.total_seconds(),
        notice=None if holder is None else holder.notice,
        noticed_at=None if holder is None else holder.noticed_at,
        parked={state: count.number for state, count in standing.parked.items()},
        parked_is_minimum=tuple(state for state, count in standing.parked.items() if count.about),
        troubles=tuple(map(_of_trouble, standing.troubles)),
    )


def properties_of(subscription: Subscription, hold: Hold | None) -> dict[str, Any]:
    """Return the fields of `StoredProperties`."""
    return {
        **{each: getattr(subscription, each) for each in _SAME},
        "held_since": None if hold is None else hold.since,
        "held_until": None if hold is None else hold.until,
        "released": None if hold is None else hold.released,
    }


def _of_partition(partition: stored.PartitionStatus) -> PartitionStatus:
    holder = partition.holder
    return PartitionStatus(
        number=partition.number,
        backlog=partition.backlog.number,
        backlog_is_estimate=partition.backlog.about,
        lag_seconds=round(partition.lag, 3),
        lag_is_estimate=partition.lag_about,
        idle_seconds=rounded(partition.idle),
        worker=_owner(holder) if partition.is_run else None,
        lease_until=None if holder is None else holder.lease_until,
        arrived=partition.arrived,
    )


def _of_trouble(trouble: Trouble) -> TroubleStatus:
    return TroubleStatus(
        state=trouble.state,
        messages=trouble.messages.number,
        messages_is_minimum=trouble.messages.about,
        since=trouble.since,
        error=trouble.error,
    )


def _owner(holder: Holder | None) -> str | None:
    return None if holder is None else holder.owner


def rounded(seconds: float | None) -> float | None:
    """Return seconds with milliseconds."""
    return None if seconds is None else round(seconds, 3)
