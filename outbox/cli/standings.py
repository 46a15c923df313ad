"""The status of subscriptions, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from outbox.cli.output import age, moment, show_table
from outbox.cli.tables import Alarm
from outbox.runtime.process import host_and_pid

if TYPE_CHECKING:
    from outbox.store.operations.parked_status import Trouble
    from outbox.store.operations.status import PartitionStatus, SubscriptionStatus

_HEADERS = ("SUBSCRIPTION", "BACKLOG", "LAG", "DELAYED", "WAITING", "RETRY", "BLOCKED", "DEAD", "WORKER")
_PARTITION_HEADERS = ("SUBSCRIPTION", "PARTITION", "BACKLOG", "LAG", "IDLE", "WORKER")


def show_standings(found: Sequence[SubscriptionStatus], *, least: int = 2) -> None:
    """Write a table of subscriptions, and a table of the partitions of those that have at least so many."""
    show_table(_HEADERS, map(_row, found), numbers=_HEADERS[1:-1])
    several = [each for each in found if each.subscription.partitions >= least]
    if partitions := [row for standing in several for row in _partition_rows(standing)]:
        click.echo()
        show_table(_PARTITION_HEADERS, partitions, numbers=_PARTITION_HEADERS[2:-1])


def standing_as_json(standing: SubscriptionStatus) -> dict[str, object]:
    """Return the status of a subscription as `--json` shows it."""
    holder = standing.holder
    return {
        "name": standing.subscription.name,
        "kind": standing.subscription.kind,
        "topics": standing.subscription.topics,
        "tags": standing.subscription.tags,
        "filter": standing.subscription.filter,
        "destination": standing.subscription.destination,
        "backlog": standing.backlog.number,
        "backlog_is_estimate": standing.backlog.about,
        "lag_seconds": round(standing.lag, 3),
        "lag_is_estimate": standing.lag_about,
        "idle_seconds": None if standing.idle is None else round(standing.idle, 3),
        "worker": holder.owner if holder is not None and standing.is_run else None,
        "partitions": [_partition_as_json(each) for each in standing.partitions],
        "next_partitions": standing.subscription.next_partitions,
        "live": standing.is_run,
        "lease_until": holder.lease_until if holder is not None else None,
        "lease_seconds": holder.length.total_seconds() if holder is not None and holder.length is not None else None,
        "notice": holder.notice if holder is not None else None,
        "noticed_at": holder.noticed_at if holder is not None else None,
        "parked": {state: count.number for state, count in standing.parked.items()},
        "parked_is_minimum": [state for state, count in standing.parked.items() if count.about],
        "held_since": None if standing.hold is None else standing.hold.since,
        "held_until": None if standing.hold is None else standing.hold.until,
        "released": None if standing.hold is None else standing.hold.released,
        "troubles": [_trouble_as_json(each) for each in standing.troubles],
    }


def _row(standing: SubscriptionStatus) -> tuple[object, ...]:
    worker = ", ".join(map(host_and_pid, standing.owners)) or Alarm("nobody")
    if standing.hold is not None:
        worker = Alarm("released") if standing.hold.released else f"held since {moment(standing.hold.since)}"
    *parked, dead = standing.parked.values()
    return (
        standing.subscription.name,
        standing.backlog,
        _lag(standing),
        *parked,
        Alarm(dead) if dead.number else dead,
        worker,
    )


def _partition_rows(standing: SubscriptionStatus) -> list[tuple[object, ...]]:
    stored = standing.subscription
    following = "" if stored.next_partitions is None else f"→{stored.next_partitions}"
    return [
        (
            stored.name,
            f"{each.number}/{stored.partitions}{following}",
            each.backlog,
            _lag(each),
            "-" if each.idle is None else age(each.idle),
            _worker(each),
        )
        for each in standing.partitions
    ]


def _worker(partition: PartitionStatus) -> str:
    if partition.holder is not None and partition.is_run:
        return host_and_pid(str(partition.holder.owner))
    return "-" if partition.arrived else Alarm("nobody")


def _lag(standing: SubscriptionStatus | PartitionStatus) -> str:
    return f"~{age(standing.lag)}" if standing.lag_about else age(standing.lag) if standing.lag else "-"


def _partition_as_json(partition: PartitionStatus) -> dict[str, object]:
    holder = partition.holder
    return {
        "number": partition.number,
        "backlog": partition.backlog.number,
        "backlog_is_estimate": partition.backlog.about,
        "lag_seconds": round(partition.lag, 3),
        "lag_is_estimate": partition.lag_about,
        "idle_seconds": None if partition.idle is None else round(partition.idle, 3),
        "worker": holder.owner if holder is not None and partition.is_run else None,
        "lease_until": holder.lease_until if holder is not None else None,
    }


def _trouble_as_json(trouble: Trouble) -> dict[str, object]:
    return {
        "state": trouble.state,
        "messages": trouble.messages.number,
        "messages_is_minimum": trouble.messages.about,
        "since": trouble.since,
        "error": trouble.error,
    }
