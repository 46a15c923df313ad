"""`outbox status`: shows the state of every subscription."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.options import DURATION, Target, about_a_database, as_json, option
from outbox.cli.output import age, counted, moment, say, show_json, show_table
from outbox.model.subscription import base_of
from outbox.runtime.process import host_and_pid
from outbox.runtime.text import labelled

if TYPE_CHECKING:
    from outbox.store.database import Channel
    from outbox.store.operations.half_status import HalfStatus
    from outbox.store.operations.parked_status import Count, Trouble
    from outbox.store.operations.status import PartitionStatus, SubscriptionStatus
    from outbox.store.subscriptions.notices import Refused
    from outbox.store.subscriptions.readers import Hold

_HEADERS = ("SUBSCRIPTION", "BACKLOG", "LAG", "DELAYED", "WAITING", "RETRY", "BLOCKED", "DEAD", "WORKER")
_NUMBERS = _HEADERS[1:-1]
_PARTITION_HEADERS = ("SUBSCRIPTION", "PARTITION", "BACKLOG", "LAG", "IDLE", "WORKER")
_HALF_HEADERS = ("GROUP", "TOPIC", "HALF", "OLDEST", "GIVEN UP", "COMMITTED", "ROLLED BACK", "LAST VERDICT")
#: Seconds before a subscription that nobody runs causes a warning, because a shorter pause is a restart.
#: Messages that have failed for less time cause none, either.
_IDLE_SECONDS = 60.0
_WAITS = ("waits", "wait")


@click.command()
@about_a_database
@as_json
@option("--watch", is_flag=True, help="Show it again and again, until interrupted.")
@option("--interval", type=DURATION, default="2s", help="Pause between two looks of --watch.")
@option("--check", is_flag=True, help="End with exit code 1 if there is any warning.")
@option("--max-lag", type=DURATION, default="5m", help="Warn of messages that have waited for longer.")
@option("--max-dead", type=click.IntRange(0, 9_999), default=0, help="Warn of more dead letters.")
@option("--max-backlog", type=click.IntRange(0), help="Warn when more messages wait.")
def status(*, target: Target, json: bool, watch: bool, interval: timedelta, check: bool, **limits: Any) -> None:
    """Show what waits, since when, and who works on it.

    BACKLOG counts messages of the log that are not settled yet, up to 10 000; ~ marks an estimate. DELAYED to DEAD
    count parked messages. LAG says for how long the oldest message of all these could have been sent: a
    delayed one counts from when it is due, a dead letter not at all.

    Warnings say what is wrong, since when, and what to do. They tell of messages that wait for their destination, have
    failed for a minute, or have waited for longer than --max-lag; and of dead letters. They also tell of a worker that
    cannot begin, a subscription that nobody runs, and a log that nobody reads. A monitor uses --check. The limits count
    for each subscription; an extract has one of its own.

    A second table has the partitions of subscriptions with more than one: 1/4 is partition 1 of four, counted from 0.
    With 1/4→2 there will be two as soon as all four have met.

    Where there are transactions with half messages, another table counts their messages by producer group and real
    topic: HALF waits for a verdict, OLDEST is the age of the oldest of these, GIVEN UP waits for a person; COMMITTED
    and ROLLED BACK reach back as far as the log. --json also has RocketMQ's metrics under their names, with
    rocketmq_finish_message_latency in seconds.

    An extract to an archive has no worker: the last column says since when retention waits for its
    next progress, or that it is released.
    """
    if check and watch:
        raise click.UsageError("--check and --watch exclude each other")
    show = _show_json if json else _show_table
    if watch:
        _watch(target, show, interval, _Limits(**limits))
        return
    look = _look_at(target, _Limits(**limits))
    show(look)
    if check and look.warnings:
        from outbox.cli.failures import FAILURE

        click.get_current_context().exit(FAILURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """The limits beyond which a subscription causes a warning; None: there is none."""

    max_lag: timedelta
    max_dead: int
    max_backlog: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The result of one look at a database, at a moment of its clock.

    `refused`: the workers that cannot begin. `unread`: the messages of a log that no subscription reads.
    """

    now: datetime
    limits: _Limits
    standings: list[SubscriptionStatus]
    refused: list[Refused]
    unread: Count | None
    halves: list[HalfStatus]

    @property
    def warnings(self) -> list[str]:
        """All warnings: of the log, of workers that cannot begin, and of all subscriptions."""
        known = {each.subscription.name for each in self.standings}
        begin = [_of_refused(each, self.now) for each in self.refused if each.name not in known]
        return [*_of_log(self), *begin, *(text for each in self.standings for text in _warnings(each, self))]

    def is_refused(self, name: str) -> bool:
        """Return whether a worker of this subscription, or of one of its routes, cannot begin."""
        known = [each.subscription for each in self.standings]
        return any(name in (each.name, base_of(each.name, known)) for each in self.refused)


def _look_at(target: Target, limits: _Limits) -> _Look:
    from outbox.cli.connection import InboxAloneError

    try:
        with target.open_outbox() as channel:
            return _looked(channel, limits)
    except InboxAloneError as error:
        say(str(error))
        return _Look(now=datetime.now(UTC), limits=limits, standings=[], refused=[], unread=None, halves=[])


def _looked(channel: Channel, limits: _Limits) -> _Look:
    from outbox.store.operations.half_status import half_standings
    from outbox.store.operations.status import standings, unread
    from outbox.store.subscriptions.notices import refused_workers

    now, found = standings(channel)
    return _Look(
        now=now,
        limits=limits,
        standings=found,
        refused=refused_workers(channel),
        unread=unread(channel, found),
        halves=half_standings(channel, now, found),
    )


def _watch(target: Target, show: Callable[[_Look], None], interval: timedelta, limits: _Limits) -> None:
    """Show the status again and again, over any number of lost connections."""
    from outbox.cli.failures import UNREACHABLE, report_failure

    reached = False
    while True:
        try:
            with target.open_outbox() as channel:
                while True:
                    found = _looked(channel, limits)
                    reached = True
                    if show is _show_table and sys.stdout.isatty():
                        click.clear()
                    show(found)
                    time.sleep(interval.total_seconds())
        except KeyboardInterrupt:
            return
        except Exception as error:
            # Wait only for a database that was reached before, because a wrong URL does not get better.
            code = report_failure(error) if reached else None
            if code is None:
                raise
            if code != UNREACHABLE:
                click.get_current_context().exit(code)
            time.sleep(interval.total_seconds())


def _show_table(look: _Look) -> None:
    found = look.standings
    show_table(_HEADERS, [_row(standing) for standing in found], numbers=_NUMBERS)
    if partitions := [row for standing in found for row in _partition_rows(standing)]:
        click.echo()
        show_table(_PARTITION_HEADERS, partitions, numbers=_PARTITION_HEADERS[2:-1])
    if look.halves:
        click.echo()
        show_table(_HALF_HEADERS, [_half_row(each) for each in look.halves], numbers=_HALF_HEADERS[2:])
    for warning in look.warnings:
        say(f"warning: {warning}")


def _half_row(half: HalfStatus) -> tuple[str, ...]:
    ages = ("-" if each is None else age(each) for each in (half.oldest, half.decided))
    oldest, decided = ages
    counts = (str(each) for each in (half.given_up, half.committed, half.rolled_back))
    return (half.group, half.topic, str(half.pending), oldest, *counts, decided)


def _partition_rows(standing: SubscriptionStatus) -> list[tuple[str, ...]]:
    stored = standing.subscription
    if stored.partitions == 1:
        return []
    following = "" if stored.next_partitions is None else f"→{stored.next_partitions}"
    return [
        (
            stored.name,
            f"{each.number}/{stored.partitions}{following}",
            str(each.backlog),
            _lag(each),
            "-" if each.idle is None else age(each.idle),
            host_and_pid(str(each.holder.owner)) if each.holder is not None and each.is_run else "nobody",
        )
        for each in standing.partitions
    ]


def _lag(standing: SubscriptionStatus | PartitionStatus) -> str:
    return f"~{age(standing.lag)}" if standing.lag_about else age(standing.lag) if standing.lag else "-"


def _row(standing: SubscriptionStatus) -> tuple[str, ...]:
    lag = _lag(standing)
    worker = ", ".join(map(host_and_pid, standing.owners)) or "nobody"
    if standing.hold is not None:
        worker = "released" if standing.hold.released else f"held since {moment(standing.hold.since)}"
    parked = (str(count) for count in standing.parked.values())
    return (standing.subscription.name, str(standing.backlog), lag, *parked, worker)


def _warnings(standing: SubscriptionStatus, look: _Look) -> list[str]:
    notices, nobody = _of_notices(standing, look), _of_nobody(standing, look)
    failing, dead = (_of_troubles(standing, look, *states) for states in (("waiting", "retry"), ("dead",)))
    blocked = _of_blocked(standing) if failing or dead else []
    # What waits for a reason that is told exceeds no limit besides.
    exceeded = [] if notices or failing or nobody else _of_limits(standing, look.limits)
    return [*notices, *failing, *dead, *blocked, *nobody, *exceeded]


def _of_notices(standing: SubscriptionStatus, look: _Look) -> list[str]:
    """Return in words what workers say of why they do not work."""
    name, holder = standing.subscription.name, standing.holder
    told = [_of_refused(each, look.now) for each in look.refused if each.name == name]
    if holder is not None and holder.notice is not None:
        since = "" if holder.noticed_at is None else f" (since {_since(holder.noticed_at, look.now)})"
        told.append(f"{labelled(name, name, holder.notice)}{since}")
    return told


def _of_troubles(standing: SubscriptionStatus, look: _Look, *states: str) -> list[str]:
    """Return in words what did not succeed and is in one of these states."""
    found = (_of_trouble(each, standing, look) for each in standing.troubles if each.state in states)
    return [f"{standing.subscription.name}: {text}" for text in found if text is not None]


def _of_log(look: _Look) -> list[str]:
    """Return in words that messages wait in a log that no subscription reads."""
    if look.unread is None or not look.unread.number:
        return []
    waiting = counted(look.unread, "message", _WAITS)
    return [f"no subscription reads this log; {waiting}; to send them, run: outbox relay --to URL"]


def _of_refused(refused: Refused, now: datetime) -> str:
    """Return in words why a worker cannot begin, which says what to do."""
    return f"{labelled(refused.name, refused.name, refused.notice)} (since {_since(refused.since, now)})"


def _of_limits(standing: SubscriptionStatus, limits: _Limits) -> list[str]:
    """Return in words which limits a subscription exceeds that seems to be well: more comes than it can do."""
    # An extract reads when it is started, and has a limit of its own.
    if standing.hold is not None:
        return []
    exceeded = []
    if standing.behind > limits.max_lag:
        oldest = age(standing.behind.total_seconds())
        exceeded.append(f"the oldest for {oldest} (--max-lag is {age(limits.max_lag.total_seconds())})")
    if limits.max_backlog is not None and standing.unsent.number > limits.max_backlog:
        exceeded.append(f"more than --max-backlog {limits.max_backlog}")
    if not exceeded:
        return []
    name, place = standing.subscription.name, standing.subscription.destination or "their turn"
    waiting = f"{counted(standing.unsent, 'message', _WAITS)} for {place}, {' and '.join(exceeded)}"
    return [f"{name}: {waiting}; whether it catches up, shows: outbox status --watch"]


def _of_blocked(standing: SubscriptionStatus) -> list[str]:
    """Return how many more messages a trouble holds back, in words: it counts only the first message of each key."""
    blocked = standing.parked["blocked"]
    if standing.subscription.kind == "check" or not blocked.number:
        return []
    held = counted(blocked, "message", ("is", "are"))
    return [f"{standing.subscription.name}: {held} blocked behind an earlier one of the same key that is not sent"]


def _of_trouble(trouble: Trouble, standing: SubscriptionStatus, look: _Look) -> str | None:
    """Return in words what did not succeed; None if it is not worth a warning."""
    from outbox.runtime.text import without_server

    since = _since(trouble.since, look.now)
    is_check, name = standing.subscription.kind == "check", standing.subscription.name
    if trouble.state == "waiting":
        place = "an answer" if is_check else standing.subscription.destination or "their destination"
        why = without_server(trouble.error or "no reason given", place)
        return f"{counted(trouble.messages, 'message', _WAITS)} for {place} since {since}: {why}"
    if trouble.state == "dead" and trouble.messages.number <= look.limits.max_dead:
        return None
    if trouble.state == "dead":
        if is_check:
            # Of each transaction the first half message alone is dead; the others are blocked behind it.
            given_up = counted(trouble.messages, "transaction", ("was", "were"))
            group_option = f" --group {quote(standing.subscription.tags[0])}" if standing.subscription.tags else ""
            decide = f"outbox half list --given-up{group_option}"
            return f"{given_up} given up since {since}: {trouble.error}; to decide, run: {decide}"
        dead = counted(trouble.messages, "dead letter")
        return f"{dead} since {since}: {trouble.error}; to decide, run: outbox dead list --name {quote(name)}"
    if is_check or (look.now - trouble.since).total_seconds() < _IDLE_SECONDS:
        return None
    failed = counted(trouble.messages, "message", ("failed and is", "failed and are"))
    return f"{failed} tried again, since {since}: {trouble.error}"


def _since(moment: datetime, now: datetime) -> str:
    return age(max(0.0, (now - moment).total_seconds()))


def _of_nobody(standing: SubscriptionStatus, look: _Look) -> list[str]:
    name, all, holder = standing.subscription.name, look.standings, standing.holder
    if standing.hold is not None:
        return _of_extract(name, standing.hold, standing.idle or 0.0)
    if standing.is_run:
        return []
    if standing.subscription.destination is None:
        unneeded = _others_are_used(name, all) and not look.is_refused(name)
        advice = f"; if nobody is to, run: outbox subscriptions drop {quote(name)}" if unneeded else ""
        return [f"nobody has run {name} yet; it keeps every message from being purged{advice}"]
    since = "" if standing.idle is None else f", for {age(standing.idle)}"
    if holder is not None and holder.lease_until is not None:
        # A worker that stops gives its lease back; this one was killed, or hangs.
        since = f", for {_since(holder.lease_until, look.now)}: its worker ended without giving the lease back"
    elif standing.idle is not None and standing.idle < _IDLE_SECONDS:
        return []
    if standing.subscription.kind == "check":
        (group,) = standing.subscription.tags or (name,)
        advice = (
            f"start a producer of it, or run outbox check; for its options: outbox half list --group {quote(group)}"
        )
        return [f"nobody checks back on group {group}{since}, and messages after its position are not purged; {advice}"]
    waits = f"{counted(standing.backlog, 'message', _WAITS)} for it, and " if standing.backlog.number else ""
    if standing.owners:
        numbers = ", ".join(str(each.number) for each in sorted(standing.unowned, key=lambda each: each.number))
        name = f"partition {numbers} of {name}"
    # A worker that cannot begin says itself what to do; the options that its relay had are the old ones.
    has_advice = standing.subscription.kind == "compensation" or look.is_refused(name)
    advice = "" if has_advice else f"; {_start(standing)}"
    return [f"nobody runs {name}{since}; {waits}messages after its position are not purged{advice}"]


def _start(standing: SubscriptionStatus) -> str:
    """Return how to start the worker of a subscription; if it sends to a function, only its application can."""
    subscription = standing.subscription
    destination = subscription.destination or ""
    if "://" not in destination and destination != "stdout:":
        return "start the application that runs it"
    topics_option = "" if subscription.topics is None else f" --topics {quote(','.join(subscription.topics))}"
    run = f"outbox relay --name {quote(subscription.name)}{topics_option} --to {quote(destination)}"
    return f"start its relay with the options that it had: {run}"


def _of_extract(name: str, hold: Hold, idle: float) -> list[str]:
    since, until = (moment(each) for each in (hold.since, hold.until))
    if hold.released:
        over = f"it made no progress from {since} until {until}, when its hold ended"
        return [f"extract {name} is released: {over}; messages after its position may be purged"]
    if idle < (hold.until - hold.since).total_seconds() / 2:
        return []
    return [f"extract {name} has made no progress since {since}; after {until} purge no longer waits for it"]


def _others_are_used(name: str, all: Sequence[SubscriptionStatus]) -> bool:
    """Return whether another subscription is in use; that of its own direct writers is dropped with it, so not that."""
    others = (each.subscription for each in all if each.subscription.name != name and each.subscription.kind != "check")
    return any(each.destination is not None and each.direct != name for each in others)


def _show_json(look: _Look) -> None:
    found = look.standings
    shown: dict[str, object] = {
        "at": look.now,
        "warnings": look.warnings,
        "refused": [{"name": each.name, "notice": each.notice, "noticed_at": each.since} for each in look.refused],
        "subscriptions": [_as_json(each, look) for each in found],
    }
    if look.halves:
        shown |= {"transactions": [_half_as_json(each) for each in look.halves], **_metrics(look)}
    show_json(shown)


def _half_as_json(half: HalfStatus) -> dict[str, object]:
    counts = {
        "half": half.pending, "given_up": half.given_up, "committed": half.committed, "rolled_back": half.rolled_back,
    }  # fmt: skip
    return {
        "group": half.group,
        "topic": half.topic,
        **{name: count.number for name, count in counts.items()},
        "estimates": [name for name, count in counts.items() if count.about],
        "oldest_seconds": None if half.oldest is None else round(half.oldest, 3),
        "last_verdict_seconds": None if half.decided is None else round(half.decided, 3),
    }


def _metrics(look: _Look) -> dict[str, object]:
    """Return RocketMQ's metrics of transactions under their names, by real topic; dead letters by subscription.

    The latency is in seconds, as RocketMQ records it: the number of messages, the sum of their latencies, the longest.
    """
    half, committed, rolled_back = Counter[str](), Counter[str](), Counter[str]()
    latencies: dict[str, dict[str, float]] = {}
    for each in look.halves:
        half[each.topic] += each.pending.number
        committed[each.topic] += each.committed.number
        rolled_back[each.topic] += each.rolled_back.number
        if each.latency is not None:
            known = latencies.setdefault(each.topic, {"count": 0, "sum": 0.0, "max": 0.0})
            known["count"] += each.latency.count
            known["sum"] = round(known["sum"] + each.latency.sum, 3)
            known["max"] = round(max(known["max"], each.latency.max), 3)
    return {
        "rocketmq_half_messages": half,
        "rocketmq_commit_messages_total": committed,
        "rocketmq_rollback_messages_total": rolled_back,
        "rocketmq_finish_message_latency": {"unit": "seconds", "topics": latencies},
        "rocketmq_send_to_dlq_messages_total": {
            each.subscription.name: each.parked["dead"].number
            for each in look.standings
            if each.subscription.kind not in ("check", "extract")
        },
    }


def _as_json(standing: SubscriptionStatus, look: _Look) -> dict[str, object]:
    holder = standing.holder
    return {
        "name": standing.subscription.name,
        "kind": standing.subscription.kind,
        "topics": standing.subscription.topics,
        "tags": standing.subscription.tags,
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
        "warnings": _warnings(standing, look),
    }


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
