"""`outbox status`: shows the state of every subscription."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from outbox.cli.options import DURATION, Target, about_a_database, as_json, option
from outbox.cli.output import age, say, show_json, show_table, warn
from outbox.cli.standings import show_standings, standing_as_json
from outbox.cli.tables import Alarm

if TYPE_CHECKING:
    from outbox.cli.diagnosis import Limits, Look
    from outbox.store.operations.half_status import HalfStatus

_HALF_HEADERS = ("GROUP", "TOPIC", "HALF", "OLDEST", "GIVEN UP", "COMMITTED", "ROLLED BACK", "LAST VERDICT")
#: Between two looks of --watch.
_PAUSE_SECONDS = 2.0


@click.command()
@about_a_database
@as_json
@option("--watch", is_flag=True, help="Show the state every two seconds, until interrupted.")
@option("--check", is_flag=True, help="End with exit code 1 if there is any warning.")
@option("--max-lag", type=DURATION, default="5m", help="Warn of messages that have waited longer.")
@option("--max-dead", type=click.IntRange(0, 9_999), default=0, help="Warn of more dead letters.")
@option("--max-backlog", type=click.IntRange(0), help="Warn when more messages wait.")
def status(
    *, target: Target, json: bool, watch: bool, check: bool, max_lag: timedelta, max_dead: int, max_backlog: int | None
) -> None:
    """Show what waits, since when, and who works on it.

    BACKLOG counts messages of the log that are not settled yet, up to 10 000; ~ marks an estimate. DELAYED to DEAD
    count parked messages. LAG says for how long the oldest of these messages could have been sent: a delayed message
    counts from its due time, a dead letter not at all.

    Warnings say what is wrong, since when, and what to do: messages have waited for their destination, have failed for
    a minute, or are older than --max-lag. Others tell of dead letters, of a worker that cannot begin, of a subscription
    without a worker, and of a log without a reader. A monitor uses --check. The limits count for each subscription, but
    for no extract.

    A second table has the partitions of subscriptions with several: 1/4 is partition 1 of four, counted from 0. With
    1/4→2 there will be two partitions as soon as all four have met.

    Where there are transactions with half messages, another table counts messages by producer group and real topic.
    HALF waits for a verdict, OLDEST is the age of the oldest, GIVEN UP waits for a person; COMMITTED and ROLLED BACK
    reach back as far as the log. --json also has RocketMQ's metrics, by RocketMQ's names, with
    rocketmq_finish_message_latency in seconds.

    An extract to an archive has no worker: the last column says since when retention waits for the next progress, or
    that the extract is released.
    """
    if check and watch:
        raise click.UsageError("--check and --watch exclude each other")
    from outbox.cli.connection import InboxAloneError
    from outbox.cli.diagnosis import Limits, Look, look_at

    show = _show_json if json else _show_table
    limits = Limits(max_lag=max_lag, max_dead=max_dead, max_backlog=max_backlog)
    if watch:
        _watch(target, show, limits)
        return
    try:
        with target.open_outbox() as channel:
            look = look_at(channel, limits)
    except InboxAloneError as error:
        say(str(error))
        look = Look(now=datetime.now(UTC), limits=limits, standings=[], refused=[], unread=None, halves=[])
    show(look)
    if check and look.warnings:
        from outbox.cli.failures import FAILURE

        click.get_current_context().exit(FAILURE)


def _watch(target: Target, show: Callable[[Look], None], limits: Limits) -> None:
    """Show the status again and again, over any number of lost connections."""
    from outbox.cli.diagnosis import look_at
    from outbox.cli.failures import UNREACHABLE, report_failure

    reached = False
    while True:
        try:
            with target.open_outbox() as channel:
                while True:
                    found = look_at(channel, limits)
                    reached = True
                    if show is _show_table and sys.stdout.isatty():
                        click.clear()
                    show(found)
                    time.sleep(_PAUSE_SECONDS)
        except KeyboardInterrupt:
            return
        except Exception as error:
            # Wait only for a database that was reached before, because a wrong URL does not get better.
            code = report_failure(error) if reached else None
            if code is None:
                raise
            if code != UNREACHABLE:
                click.get_current_context().exit(code)
            time.sleep(_PAUSE_SECONDS)


def _show_table(look: Look) -> None:
    show_standings(look.standings)
    if look.halves:
        click.echo()
        show_table(_HALF_HEADERS, map(_half_row, look.halves), numbers=_HALF_HEADERS[2:])
    for warning in look.warnings:
        warn(warning)


def _half_row(half: HalfStatus) -> tuple[object, ...]:
    oldest, decided = ("-" if each is None else age(each) for each in (half.oldest, half.decided))
    given_up = Alarm(half.given_up) if half.given_up.number else half.given_up
    return (half.group, half.topic, half.pending, oldest, given_up, half.committed, half.rolled_back, decided)


def _show_json(look: Look) -> None:
    found = look.standings
    shown: dict[str, object] = {
        "at": look.now,
        "warnings": look.warnings,
        "refused": [{"name": each.name, "notice": each.notice, "noticed_at": each.since} for each in look.refused],
        "subscriptions": [standing_as_json(each) | {"warnings": look.warnings_of(each)} for each in found],
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


def _metrics(look: Look) -> dict[str, object]:
    """Return RocketMQ's metrics of transactions by RocketMQ's names and by real topic; dead letters by subscription.

    The latency is in seconds, as in RocketMQ: the number of messages, the sum of the latencies, the longest.
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
