"""`outbox status`: shows the state of every subscription."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.options import DURATION, Target, about_a_database, as_json, option
from outbox.cli.output import age, moment, printable, say, show_json, show_table, warn
from outbox.cli.statuses import say_pauses, show_statuses
from outbox.cli.tables import Alarm

if TYPE_CHECKING:
    from outbox.admin.results import Look, Thresholds
    from outbox.model.command import Commands
    from outbox.model.status import Status, TransactionsStatus

_HALF_HEADERS = ("GROUP", "TOPIC", "HALF", "OLDEST", "GIVEN UP", "COMMITTED", "ROLLED BACK", "LAST VERDICT")
#: Between two looks of --watch.
_PAUSE_SECONDS = 2.0


class _Limit(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A limit, or `NAME=LIMIT` for one subscription."""

    def __init__(self, of: click.ParamType) -> None:  # type: ignore[type-arg]  # as above
        self._of = of
        self.name = of.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str | None, Any]:
        """Return the name of the subscription, if there is one, and the limit."""
        if isinstance(value, tuple):
            return value
        name, _, limit = value.rpartition("=")
        return name or None, self._of.convert(limit, param, ctx)


def _limit(name: str, of: click.ParamType, help: str) -> Callable[[Any], Any]:  # type: ignore[type-arg]  # as above
    return option(name, type=_Limit(of), multiple=True, metavar="[NAME=]LIMIT", help=help)


def _thresholds(given: Sequence[tuple[str, str | None, Any]]) -> Thresholds:
    """Return thresholds from limits, each with the name of a subscription, or None for all."""
    from outbox.admin.results import Thresholds

    common = Thresholds(**{limit: value for limit, name, value in given if name is None})
    named: dict[str, Thresholds] = {}
    for limit, name, value in given:
        if name is not None:
            named[name] = replace(named.get(name, common), **{limit: value})
    return replace(common, named=named)


@click.command()
@about_a_database
@as_json
@option("--watch", is_flag=True, help="Show the state every two seconds, with rates and marks, until interrupted.")
@option("--check", is_flag=True, help="End with exit code 1 if there is any warning.")
@_limit("--max-lag", DURATION, "Warn of messages that have waited longer. [5m]")
@_limit("--max-dead", click.IntRange(0, 9_999), "Warn of more dead letters. [0]")
@_limit("--max-backlog", click.IntRange(0), "Warn when more messages wait. [any number]")
def status(*, target: Target, json: bool, watch: bool, check: bool, **limits: Sequence[tuple[str | None, Any]]) -> None:
    """Show what waits, since when, and who works on it.

    BACKLOG counts messages of the log that are not settled yet, up to 10 000; ~ marks an estimate. DELAYED to
    BEHIND count parked messages. LAG says for how long the oldest of these messages could have been sent: a delayed
    message counts from its due time, a dead letter not at all.

    Findings say what is wrong, since when, and what to do: messages have waited for their destination, have failed for
    a minute, or are older than --max-lag. Others tell of dead letters, of a worker that cannot begin, of a subscription
    without a worker, and of a log without a reader. A monitor uses --check. The limits count for each subscription, but
    for no extract; --max-lag 5m --max-lag billing=1h gives one subscription a limit of its own.

    A second table has the partitions of subscriptions with several: 1/4 is partition 1 of four, counted from 0. With
    1/4→2 there will be two partitions as soon as all four have met.

    Where there are transactions with half messages, another table counts messages by producer group and real topic.
    HALF waits for a verdict, OLDEST is the age of the oldest, GIVEN UP waits for a person; COMMITTED and ROLLED BACK
    reach back as far as the log. --json also has RocketMQ's metrics, by RocketMQ's names, with
    rocketmq_finish_message_latency in seconds.

    A line below the tables says what a person has paused, since when and why; that is no finding.

    An extract to an archive has no worker: the last column says since when retention waits for the next progress, or
    that the extract is released.
    """
    if check and watch:
        raise click.UsageError("--check and --watch exclude each other")
    from outbox.admin.admin import Admin
    from outbox.admin.results import Look
    from outbox.cli.connection import InboxAloneError

    thresholds = _thresholds([(limit, *each) for limit, given in limits.items() for each in given])
    if watch:
        _watch(target, thresholds, json=json)
        return
    try:
        with target.open_outbox() as channel:
            look = Admin(channel).look(thresholds)
    except InboxAloneError as error:
        say(str(error))
        look = Look(at=datetime.now(UTC))
    if json:
        show_json(look.document())
    else:
        _show_table(look, target.commands)
    if check and look.findings:
        from outbox.cli.failures import FAILURE

        click.get_current_context().exit(FAILURE)


def _watch(target: Target, thresholds: Thresholds, *, json: bool) -> None:
    """Show the status again and again, over any number of lost connections."""
    from outbox.admin.admin import Admin
    from outbox.cli.failures import UNREACHABLE, report_failure
    from outbox.store.label import label_of

    reached = False
    while True:
        try:
            with target.open_outbox() as channel:
                label, before = label_of(channel.database.engine.url, target.schema), None
                while True:
                    found = Admin(channel).look(thresholds)
                    reached = True
                    if json:
                        show_json(found.document())
                    else:
                        if sys.stdout.isatty():
                            click.clear()
                        show_watched(found, before, label, target.commands)
                    before = found
                    time.sleep(_PAUSE_SECONDS)
        except KeyboardInterrupt:
            return
        except Exception as error:
            # Wait only for a database that was reached before, because a wrong URL does not get better.
            code = report_failure(error, commands=target.commands) if reached else None
            if code is None:
                raise
            if code != UNREACHABLE:
                click.get_current_context().exit(code)
            time.sleep(_PAUSE_SECONDS)


def show_watched(look: Look, before: Look | None, label: str, commands: Commands) -> None:
    """Write the clock and the name of the database, and the tables with rates and marks for what has changed."""
    seconds = 0.0 if before is None else max(0.0, (look.at - before.at).total_seconds())
    rows, known = (0 if each is None or each.log is None else each.log.rows for each in (look, before))
    written = f", {(rows - known) / seconds:,.0f} messages/s written" if seconds and rows >= known else ""
    click.echo(click.style(f"{moment(look.at)}  {printable(label)}{written}", bold=True))
    click.echo()
    _show_table(look, commands, before=() if before is None else before.subscriptions, seconds=seconds)


def _show_table(look: Look, commands: Commands, *, before: Sequence[Status] = (), seconds: float = 0.0) -> None:
    show_statuses(look.subscriptions, before=before, seconds=seconds)
    if look.transactions:
        click.echo()
        show_table(_HALF_HEADERS, map(_half_row, look.transactions), numbers=_HALF_HEADERS[2:])
    say_pauses(look.subscriptions, commands)
    for finding in look.findings:
        warn(str(finding))


def _half_row(each: TransactionsStatus) -> tuple[object, ...]:
    oldest, decided = (
        "-" if seconds is None else age(seconds) for seconds in (each.oldest_seconds, each.last_verdict_seconds)
    )
    half, given_up, committed, rolled_back = map(each.count, ("half", "given_up", "committed", "rolled_back"))
    alarm = Alarm(given_up) if each.given_up else given_up
    return (each.group, each.topic, half, oldest, alarm, committed, rolled_back, decided)
