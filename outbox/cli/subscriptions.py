"""`outbox subscriptions`: the readers of the log, with topics, destination and policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.groups import Group
from outbox.cli.options import (
    DURATION,
    KEY,
    NAMES,
    RATE,
    START,
    Target,
    about_a_database,
    as_json,
    by_content,
    by_whom,
    confirmed,
    option,
    to_a_destination,
)
from outbox.cli.output import age, counted, moment, show_json, show_table, tell
from outbox.cli.statuses import say_pauses, selected

if TYPE_CHECKING:
    from outbox.admin.results import SubscriptionDetails
    from outbox.model.status import HistoryStep
    from outbox.model.subscription import Start

_HEADERS = ("NAME", "TOPICS", "DESTINATION", "ON DEAD", "PARTITIONS", "CREATED (UTC)", "WORKER")
_HISTORY = ("UNTIL (UTC)", "PASSED", "A SECOND", "LAG", "PARKED")
#: The question of a drop ends with its consequence, by kind.
_AFTER_A_DROP = {
    "check": "Nobody would be asked about its pending transactions any more. To decide them, answer no and run: {}",
    "extract": "Messages that its archive does not have yet may be purged then.",
    "backfill": "The messages that are left would not be handled again.",
}

_wait_for_lease = option(
    "--wait", type=DURATION, default="30s", help="How long to ask a worker for the lease; 0s: not at all."
)


@click.group(cls=Group, no_args_is_help=True)
def subscriptions() -> None:
    """List, alter, split, pause, resume, reset, backfill and drop the readers of the log."""


@subscriptions.command("list")
@about_a_database
@as_json
def list_(*, target: Target, json: bool) -> None:
    """List the subscriptions: topics, destination, policy, worker; and what a person has paused."""
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        found = Admin(channel).subscriptions()
    if json:
        show_json({"subscriptions": found})
    else:
        show_table(_HEADERS, map(_row, found))
        say_pauses(found, target.commands)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--since", type=DURATION, default="1h", help="How long ago the first step begins.")
@option("--step", type=DURATION, default="5m", help="The length of each step.")
@as_json
def history(*, target: Target, name: str, since: timedelta, step: timedelta, json: bool) -> None:
    """Show what a subscription has passed, its lag, and what is parked, over time.

    Told from the settles of workers, which are kept for a day. PARKED is how many of the messages that are parked now
    were parked by then.
    """
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        try:
            found = Admin(channel).history(name, since=since, step=step)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    if json:
        show_json({each.name: getattr(found, each.name) for each in fields(found)})
        return
    show_table(_HISTORY, map(_of_step, found.steps), numbers=_HISTORY[1:])


def _of_step(step: HistoryStep) -> tuple[object, ...]:
    lag = None if step.lag_seconds is None else age(step.lag_seconds)
    return (moment(step.at, zone=False), step.passed, step.per_second, lag, sum(step.parked.values()))


@subscriptions.command()
@about_a_database
@click.argument("name")
@option(
    "--topics", type=NAMES, help="Read only these topics; 'orders.*' is a pattern, '!orders.*' an exception, '*' all."
)
@by_content
@to_a_destination
@option("--on-dead", type=click.Choice(["block", "continue"]), help="Whether a dead letter holds back the key.")
@option("--grace", type=DURATION, help="Time from the commit of a message until it may be read.")
@option("--ordered/--no-ordered", default=None, help="Whether a message waits for earlier ones of its key.")
@option("--compact/--no-compact", default=None, help="Whether only the newest of a key's waiting messages is handled.")
@option("--partitions", type=click.IntRange(1), help="How many workers may share the messages; not with other changes.")
@_wait_for_lease
@by_whom
@as_json
def alter(
    *, target: Target, name: str, to: str | None, wait: timedelta, by: str | None, json: bool, **change: Any
) -> None:
    """Give a subscription another selection, destination, policy or number of partitions.

    Topics of another route of the same relay are refused, because both routes would send the messages.

    Workers may run: the worker with the lease finishes its calls and pauses for the change. A worker with another
    declaration ends then; with several databases or routes, or in an application, the worker tries again instead.

    A change counts from the position of the subscription: earlier messages are not read again. For earlier messages of
    new topics see outbox subscriptions backfill.

    With --on-dead continue the messages behind present dead letters go on, too, in their order; the dead letters stay.
    With --on-dead block later dead letters hold back their keys, present dead letters do not.

    Another number of partitions counts as soon as all partitions stand at the same position. A single partition does at
    once. Several are handled up to the foremost position, by the running relays, before any goes on. The command waits
    as long as --wait says; the relays do not need the command. The present number takes the change back.
    """
    others = {to, *(value for what, value in change.items() if what != "partitions")} - {None}
    if change["partitions"] is None and not others:
        raise click.UsageError(
            "nothing to alter: give --topics, --tags, --filter, --to, --on-dead, --grace, --ordered, --compact or"
            " --partitions"
        )
    if change["partitions"] is not None and others:
        raise click.UsageError("--partitions is a change of its own: give no other")
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        altered = Admin(channel).alter(name, wait=wait, by=by, destination=to, **change)
    told = f"{_described(altered)}, a dead letter: {altered.on_dead}"
    told += ", only the newest message of a key" if altered.compact else ""
    told += f", {age(altered.grace_seconds)} after the commit" if altered.grace_seconds else ""
    told += "" if altered.partitions == 1 else f", {altered.partitions} partitions"
    if altered.next_partitions is not None:
        told += (
            f"; {counted(altered.next_partitions, 'partition')} as soon as its relays have handled each up to where the"
            f" foremost is; to look, run: {target.commands.line('status')}"
        )
    tell(told, {"subscription": altered}, json=json)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--topics", type=NAMES, required=True, help="The topics or patterns of the new subscription.")
@to_a_destination
@option("--as", "as_name", metavar="NEW", help="Name of the new subscription.  [default: as of a --route]")
@_wait_for_lease
@by_whom
@as_json
def split(
    *,
    target: Target,
    name: str,
    topics: tuple[str, ...],
    to: str | None,
    as_name: str | None,
    wait: timedelta,
    by: str | None,
    json: bool,
) -> None:
    """Give topics of a subscription to a new subscription with another destination.

    The new subscription begins exactly at the position of NAME, with the policy of NAME, and takes over the parked
    messages of the topics. So nothing is left out, and nothing is sent twice.

    A relay at work finishes its calls first. Then the relay ends, because its topics have changed; with several
    databases or routes, or in an application, the relay tries again instead. Start outbox relay with a --route for the
    topics.
    """
    if to is None:
        raise click.UsageError("no destination for the new subscription: give --to URL or --to-file PATH")
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        done = Admin(channel).split(name, topics, destination=to, as_name=as_name, wait=wait, by=by)
    parked = f", with {counted(done.moved, 'parked message')}" if done.moved else ""
    told = f"{_described(done.made)}, from where {done.split.name} stands{parked}; {_described(done.split)}"
    tell(told, {"split": done.split, "made": done.made, "moved": done.moved}, json=json)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--key", type=KEY, help="Hold back only the messages of this key.")
@option("--rate", type=RATE, help="Hand over at most so many messages, as 500/s, 30/m or 10/h.")
@option("--reason", help="Why; outbox status shows the reason.")
@by_whom
@as_json
def pause(
    *,
    target: Target,
    name: str,
    key: str | None,
    rate: float | None,
    reason: str | None,
    by: str | None,
    json: bool,
) -> None:
    """Let the workers of a subscription hand nothing over, or less, until outbox subscriptions resume.

    Workers go on to run. All follow within a second: a call under way ends, and the outcome is settled. A paused
    subscription keeps its position, so nothing after that is purged.

    With --key other keys go on. The messages of the key are parked, and go out in their order at the resume.

    A --rate counts for the subscription; each partition has an equal share.
    """
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        found = Admin(channel).pause(name, key=key, rate=rate, reason=reason, by=by)
    _tell_pauses(found, json=json)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--key", type=KEY, help="Only the messages of this key go on.")
@by_whom
@as_json
def resume(*, target: Target, name: str, key: str | None, by: str | None, json: bool) -> None:
    """Let the workers of a paused or slowed-down subscription go on.

    Without --key, keys that were paused by themselves stay paused.
    """
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        found = Admin(channel).resume(name, key=key, by=by)
    _tell_pauses(found, "resumed; still " if found[0].pauses else "resumed", json=json)


def _tell_pauses(found: Sequence[SubscriptionDetails], before: str = "", *, json: bool) -> None:
    names, pauses = " and ".join(each.name for each in found), found[0].pauses
    paused = "; ".join(each.in_words() for each in pauses)
    told = {"subscriptions": [each.name for each in found], "pauses": pauses}
    tell(f"{names}: {before}{paused}", told, json=json)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--to", type=START, required=True, help="Where to begin again.")
@option("--force", is_flag=True, help="Ask a worker at work for its lease.")
@option("--yes", is_flag=True, help="Do not ask.")
@by_whom
@as_json
def reset(*, target: Target, name: str, to: Start, force: bool, yes: bool, by: str | None, json: bool) -> None:
    """Let a subscription begin again at another position, and delete what it has parked.

    earliest: with the first message that is not purged. latest: with what is committed from now on. A time: with the
    first message that was created then or later.

    Messages are sent again as they were. What is past its expiry becomes a dead letter. Of a broadcast consumer all
    instances begin again. The inbox of a consumer stays: the listener is not called for messages that it remembers. A
    backfill goes on.

    Refused while a worker runs. With --force the worker is asked for its lease for 30 s: the worker finishes its calls,
    gives the lease back, and goes on from the new position.
    """
    from outbox.admin.admin import Admin
    from outbox.admin.borrowing import NO_WAIT, WAIT, LeaseHeldError
    from outbox.errors import SubscriptionError

    with target.open_outbox() as channel:
        meant = Admin(channel).reset(name, to, rehearsal=True)
        names, at = " and ".join(meant.names), to if isinstance(to, str) else moment(to)
        lost = f" and delete the parked messages ({_by_state(meant.parked)})" if meant.parked else ""
        confirmed(f"let {names} begin again at {at}{lost}?", yes=yes)
        try:
            done = Admin(channel).reset(name, to, wait=WAIT if force else NO_WAIT, by=by)
        except LeaseHeldError as error:
            if force or error.holder.is_command:
                raise
            hint = "give --force: the worker then gives the lease back, and goes on"
            raise SubscriptionError(f"{error}, or {hint}") from None
    gone = f"; {_by_state(done.parked)} deleted" if done.parked else ""
    told = f"{names} {'begins' if len(meant.names) == 1 else 'begin'} again at {at}{gone}"
    tell(told, {"reset": done.names, "to": to, "parked": done.parked}, json=json)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--topics", type=NAMES, required=True, help="The topics or patterns to handle again.")
@option(
    "--from",
    "start",
    type=START,
    default="earliest",
    envvar="OUTBOX_SUBSCRIPTIONS_BACKFILL_FROM",
    help="Where to begin: earliest, or a time.",
)
@by_whom
@as_json
def backfill(*, target: Target, name: str, topics: tuple[str, ...], start: Start, by: str | None, json: bool) -> None:
    """Handle earlier messages of some topics again, or for the first time, beside a subscription that goes on.

    The workers of NAME handle the messages up to now as a subscription of its own, NAME:backfill, with the policy of
    NAME. It ends by itself when everything is handled and nothing is parked; dead letters keep it until a person
    decides. A message of a key may come before a later message that NAME has handled already: no order is promised
    between the two. What NAME has not reached yet comes twice.

    No worker needs to stop. To end it early, drop NAME:backfill.
    """
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        made = Admin(channel).backfill(name, topics, start=start, by=by)
    at = start if isinstance(start, str) else moment(start)
    told = f"{_described(made)}, from {at} up to now; {target.commands.line('status')} shows it until its end"
    tell(told, {"subscription": made}, json=json)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--yes", is_flag=True, help="Do not ask.")
@by_whom
@as_json
def drop(*, target: Target, name: str, yes: bool, by: str | None, json: bool) -> None:
    """Forget a subscription, with its position and its parked messages, while no worker runs.

    Of a broadcast consumer all instances go. A backfill goes with its subscription. NAME:backfill alone may be dropped
    while workers run, which ends it early.
    """
    from outbox.admin.admin import Admin
    from outbox.model.subscription import check_of

    with target.open_outbox() as channel:
        meant = Admin(channel).drop(name, rehearsal=True)
        names = " and ".join(meant.names)
        lost = f", with the messages that were parked ({_by_state(meant.parked)})" if meant.parked else ""
        pending = target.commands.line("half", "list", "--group", name.removeprefix(check_of("")))
        after = _AFTER_A_DROP.get(meant.kind, "A worker of that name would begin anew.").format(pending)
        confirmed(f"drop {names}{lost}? {after}", yes=yes)
        dropped = Admin(channel).drop(name, by=by)
    told = f"{names} {'is' if len(dropped.names) == 1 else 'are'} dropped{lost}"
    tell(told, {"dropped": dropped.names, "parked": dropped.parked}, json=json)


def _by_state(parked: Mapping[str, object]) -> str:
    return ", ".join(f"{number} {state}" for state, number in parked.items())


def _row(each: SubscriptionDetails) -> tuple[object, ...]:
    worker = ", ".join(sorted({owner for owner in each.workers if owner is not None})) or "nobody"
    if each.held_since is not None:
        worker = "released" if each.released else f"held since {moment(each.held_since)}"
    following = "" if each.next_partitions is None else f"→{each.next_partitions}"
    is_held = each.held_since is not None
    return (
        each.name,
        _topics(each),
        _destination(each),
        each.on_dead or ("-" if is_held else "(none yet)"),
        "-" if is_held else f"{each.partitions}{following}",
        moment(each.created_at, zone=False),
        worker,
    )


def _destination(each: SubscriptionDetails) -> str:
    if each.kind == "check":
        return "(check-back)"
    if each.hold_seconds is not None and "/" in (each.destination or ""):
        return f"archive {each.destination}"
    # Without a destination a backfill is that of a consumer.
    if each.destination is None and each.kind in ("consumer", "broadcast", "backfill"):
        return "(broadcast)" if each.kind == "broadcast" else "(consumer)"
    return each.destination or "(none yet)"


def _described(each: SubscriptionDetails) -> str:
    return f"{each.name}: {_topics(each)} to {_destination(each)}"


def _topics(each: SubscriptionDetails) -> str:
    if each.kind == "check":
        return f"transactions of {','.join(each.tags or ())}"
    return selected(each)
