"""Subscriptions for people: the selection in words, the status as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from outbox.cli.output import age, moment, say, show_table
from outbox.cli.tables import Alarm
from outbox.model.parking import States
from outbox.runtime import text
from outbox.runtime.process import host_and_pid

if TYPE_CHECKING:
    from outbox.admin.results import SubscriptionDetails
    from outbox.model.command import Commands
    from outbox.model.status import PartitionStatus, Status
    from outbox.model.subscription import Declaration

_HEADERS = ("SUBSCRIPTION", "BACKLOG", "LAG", "DELAYED", "WAITING", "RETRY", "DEAD", "BEHIND", "INFLIGHT", "WORKER")
_PARTITION_HEADERS = ("SUBSCRIPTION", "PARTITION", "BACKLOG", "LAG", "IDLE", "WORKER")


def show_statuses(
    found: Sequence[Status], *, least: int = 2, before: Sequence[Status] = (), seconds: float = 0.0
) -> None:
    """Write a table of subscriptions, and a table of the partitions of those that have at least so many.

    `before`: the statuses of `seconds` ago. Numbers that have changed since then are marked by ▲ or ▼, and BACKLOG has
    the change a second.
    """
    known = {each.name: each for each in before}
    rows = (_row(each, known.get(each.name), seconds) for each in found)
    show_table(_HEADERS, rows, numbers=_HEADERS[1:-1])
    several = [each for each in found if len(each.partitions) >= least]
    if partitions := [row for status in several for row in _partition_rows(status)]:
        click.echo()
        show_table(_PARTITION_HEADERS, partitions, numbers=_PARTITION_HEADERS[2:-1])


def say_pauses(found: Iterable[Status | SubscriptionDetails], commands: Commands) -> None:
    """Say what people have paused: no problem, but to be known."""
    for each in found:
        for pause in each.pauses if each.kind != "backfill" else ():
            words = f"{pause.in_words()} since {moment(pause.since)}"
            resume = pause.resume(each.name, commands)
            say(f"{text.labelled(each.name, each.name, words)}; to go on, run: {resume}")


def selected(subscription: SubscriptionDetails | Declaration) -> str:
    """Return the selection of a subscription in words: topics, tags and filter."""
    from outbox.model.filter.tags import tag_expression

    topics = "all topics" if subscription.topics is None else ",".join(subscription.topics)
    tags = "" if subscription.tags is None else f", tags {tag_expression(subscription.tags)}"
    return f"{topics}{tags}{'' if subscription.filter is None else f', {text.one_line(subscription.filter)}'}"


def changed(now: int, before: int | None, seconds: float = 0.0) -> str:
    """Return a mark for a number that has changed, with the change a second if `seconds` have passed."""
    if before is None or now == before:
        return ""
    rate = f" {(now - before) / seconds:+,.0f}/s" if seconds else ""
    return f"{'▲' if now > before else '▼'}{rate}"


def _row(status: Status, before: Status | None, seconds: float) -> tuple[object, ...]:
    worker = ", ".join(map(host_and_pid, status.workers)) or Alarm("nobody")
    if status.is_paused:
        worker = "paused"
    if status.held_since is not None:
        worker = Alarm("released") if status.released else f"held since {moment(status.held_since)}"
    parked = {
        state: f"{status.count(state)}{changed(each, None if before is None else before.parked[state])}"
        for state, each in status.parked.items()
    }
    if status.parked[States.DEAD]:
        parked[States.DEAD] = Alarm(parked[States.DEAD])
    return (
        status.name,
        f"{status.unsettled}{changed(status.backlog, None if before is None else before.backlog, seconds)}",
        _lag(status),
        *parked.values(),
        worker,
    )


def _partition_rows(status: Status) -> list[tuple[object, ...]]:
    following = "" if status.next_partitions is None else f"→{status.next_partitions}"
    return [
        (
            status.name,
            f"{each.number}/{len(status.partitions)}{following}",
            each.unsettled,
            _lag(each),
            "-" if each.idle_seconds is None else age(each.idle_seconds),
            host_and_pid(each.worker) if each.worker is not None else "-" if each.arrived else Alarm("nobody"),
        )
        for each in status.partitions
    ]


def _lag(status: Status | PartitionStatus) -> str:
    if status.lag_is_estimate:
        return f"~{age(status.lag_seconds)}"
    return age(status.lag_seconds) if status.lag_seconds else "-"
