"""`outbox subscriptions`: the readers of the log, with topics, destination and policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from outbox.cli.groups import Group
from outbox.cli.options import (
    DURATION,
    NAMES,
    RATE,
    START,
    Target,
    about_a_database,
    as_json,
    as_value,
    by_content,
    confirmed,
    option,
    to_a_destination,
)
from outbox.cli.output import age, counted, moment, show_json, show_table, tell
from outbox.cli.standings import selected
from outbox.runtime.process import user_and_host

if TYPE_CHECKING:
    from outbox.model.lease import Holder, Partition
    from outbox.model.subscription import OnDead, Start, Subscription
    from outbox.store.database import Channel
    from outbox.store.operations.parked_status import Count
    from outbox.store.subscriptions.holds import Hold

_HEADERS = ("NAME", "TOPICS", "DESTINATION", "ON DEAD", "PARTITIONS", "CREATED (UTC)", "WORKER")

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
    """List the subscriptions: topics, destination, policy, worker."""
    from outbox.store.subscriptions.holds import hold_of
    from outbox.store.subscriptions.leases import Leases
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        found = [
            (each, Leases(channel).look_all(each.all_partitions()), hold_of(channel, each))
            for each in Subscriptions(channel).all()
        ]
    if json:
        show_json({"subscriptions": [_as_json(*each) for each in found]})
    else:
        show_table(_HEADERS, [_row(*each) for each in found])


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The options of `alter` for a change."""

    topics: tuple[str, ...] | None
    tags: str | None
    filter: str | None
    on_dead: OnDead | None
    grace: timedelta | None
    ordered: bool | None
    compact: bool | None
    partitions: int | None


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
@as_value("change", Change)
@_wait_for_lease
@as_json
def alter(*, target: Target, name: str, to: str | None, change: Change, wait: timedelta, json: bool) -> None:
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
    others = {to, *(getattr(change, each.name) for each in fields(change) if each.name != "partitions")} - {None}
    if change.partitions is None and not others:
        raise click.UsageError(
            "nothing to alter: give --topics, --tags, --filter, --to, --on-dead, --grace, --ordered, --compact or"
            " --partitions"
        )
    if change.partitions is not None and others:
        raise click.UsageError("--partitions is a change of its own: give no other")
    from outbox.admin import commands
    from outbox.admin.repartition import repartition
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        if change.partitions is not None:
            altered = repartition(channel, name, change.partitions, wait=wait)
        else:
            stored = Subscriptions(channel).get(name)
            altered = commands.alter(channel, _changed(stored, change, to), before=stored, wait=wait)
    told = f"{_described(altered)}, a dead letter: {altered.on_dead}"
    told += f", {age(altered.grace.total_seconds())} after the commit" if altered.grace else ""
    told += "" if altered.partitions == 1 else f", {altered.partitions} partitions"
    if altered.next_partitions is not None:
        told += (
            f"; {counted(altered.next_partitions, 'partition')} as soon as its relays have handled each up to where the"
            " foremost is, which outbox status shows"
        )
    tell(told, _declared(altered), json=json)


def _changed(stored: Subscription, change: Change, to: str | None) -> Subscription:
    from outbox.model.filter.sql92 import chosen_filter
    from outbox.model.filter.tags import chosen_tags
    from outbox.model.topics import chosen_topics

    destination = None if to is None else _checked_destination(to, stored)
    if not stored.is_used and destination is None and stored.direct is None:
        raise click.UsageError(
            f"{stored.name} has no destination yet: its first worker declares all of it; or say --to"
        )
    return replace(
        stored,
        topics=stored.topics if change.topics is None else chosen_topics(change.topics),
        tags=stored.tags if change.tags is None else chosen_tags(change.tags),
        filter=stored.filter if change.filter is None else chosen_filter(change.filter),
        destination=destination or stored.destination,
        on_dead=change.on_dead or stored.on_dead or "block",
        grace=stored.grace if change.grace is None else change.grace,
        ordered=stored.ordered if change.ordered is None else change.ordered,
        compact=stored.compact if change.compact is None else change.compact,
    )


def _checked_destination(to: str, stored: Subscription) -> str:
    """Return a destination in its stored form. The URL is checked as by `outbox relay`, without a connection."""
    from outbox.senders.opening import is_offered, open_sender
    from outbox.senders.port import destination_of

    # Senders and functions of an application are opened there only; a sender may call itself `shop://orders`.
    own = ("sender", "callable", (stored.destination or "").partition(":")[0])
    if to.partition(":")[0] in own and not is_offered(to):
        return destination_of(to)
    opened = open_sender(to)
    opened.close()
    return opened.destination


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--topics", type=NAMES, required=True, help="The topics or patterns of the new subscription.")
@to_a_destination
@option("--as", "as_name", metavar="NEW", help="Name of the new subscription.  [default: as of a --route]")
@_wait_for_lease
@as_json
def split(
    *,
    target: Target,
    name: str,
    topics: tuple[str, ...],
    to: str | None,
    as_name: str | None,
    wait: timedelta,
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
    from outbox.admin.split import split as carry_out
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        destination = _checked_destination(to, Subscriptions(channel).get(name))
        done = carry_out(channel, name, topics, destination=destination, as_name=as_name, wait=wait)
    parked = f", with {counted(done.parked, 'parked message')}" if done.parked else ""
    tell(
        f"{_described(done.made)}, from where {done.origin.name} stands{parked}; {_described(done.origin)}",
        {"split": _declared(done.origin), "made": _declared(done.made), "moved": done.parked},
        json=json,
    )


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--key", help="Hold back only the messages of this key.")
@option("--rate", type=RATE, help="Hand over at most so many messages, as 500/s, 30/m or 10/h.")
@option("--reason", help="Why; outbox status shows the reason.")
@as_json
def pause(*, target: Target, name: str, key: str | None, rate: float | None, reason: str | None, json: bool) -> None:
    """Let the workers of a subscription hand nothing over, or less, until outbox subscriptions resume.

    Workers go on to run. All follow within a second: a call under way ends, and the outcome is settled. A paused
    subscription keeps its position, so nothing after that is purged. Writers that send directly go on.

    With --key other keys go on. The messages of the key are parked as blocked, and go out in their order at the resume.

    A --rate counts for the subscription; each partition has an equal share.
    """
    from outbox.admin.pausing import pause as order

    with target.open_outbox() as channel:
        found = order(channel, name, key=key, rate=rate, by=user_and_host(), reason=reason)
    _tell_pauses(found, json=json)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--key", help="Only the messages of this key go on.")
@as_json
def resume(*, target: Target, name: str, key: str | None, json: bool) -> None:
    """Let the workers of a paused or slowed-down subscription go on.

    Without --key, keys that were paused by themselves stay paused.
    """
    from outbox.admin.pausing import resume as order

    with target.open_outbox() as channel:
        found = order(channel, name, key=key)
    _tell_pauses(found, json=json)


def _tell_pauses(found: Sequence[Subscription], *, json: bool) -> None:
    names, pauses = " and ".join(each.name for each in found), found[0].pauses
    paused = "; ".join(each.in_words() for each in pauses)
    told = {"subscriptions": [each.name for each in found], "pauses": [asdict(each) for each in pauses]}
    tell(f"{names}: {paused or 'nothing is paused'}", told, json=json)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--to", type=START, required=True, help="Where to begin again.")
@option("--force", is_flag=True, help="Ask a worker at work for its lease.")
@option("--yes", is_flag=True, help="Do not ask.")
@as_json
def reset(*, target: Target, name: str, to: Start, force: bool, yes: bool, json: bool) -> None:
    """Let a subscription begin again at another position, and delete what it has parked.

    earliest: with the first message that is not purged. latest: with what is committed from now on. A time: with the
    first message that was created then or later.

    Messages are sent again as they were. What is past its expiry becomes a dead letter. Of a broadcast consumer all
    instances begin again. The inbox of a consumer stays: the listener is not called for messages that it remembers. A
    backfill goes on.

    Direct writers may go on. Their subscription, NAME:compensation, begins again as well, so that the relay also sends
    what writers have sent. A message that a writer sends at the moment of the reset may come twice.

    Refused while a worker runs. With --force the worker is asked for its lease for 30 s: the worker finishes its calls,
    gives the lease back, and goes on from the new position.
    """
    from outbox.admin import commands
    from outbox.admin.borrowing import NO_WAIT, WAIT, WorkerAliveError
    from outbox.errors import SubscriptionError

    with target.open_outbox() as channel:
        meant, parked = _with_followers(channel, name, backfills=False)
        commands.require_resettable(meant[0])
        names, at = " and ".join(each.name for each in meant), to if isinstance(to, str) else moment(to)
        lost = f" and delete the parked messages ({_by_state(parked)})" if parked else ""
        confirmed(f"let {names} begin again at {at}{lost}?", yes=yes)
        try:
            deleted = commands.reset(channel, name, to, wait=WAIT if force else NO_WAIT)
        except WorkerAliveError as error:
            hint = "" if force else ", or give --force: the worker then gives the lease back, and goes on"
            raise SubscriptionError(f"{error}{hint}") from None
    gone = f"; {_by_state(deleted)} deleted" if deleted else ""
    told = f"{names} {'begins' if len(meant) == 1 else 'begin'} again at {at}{gone}"
    tell(told, {"reset": [each.name for each in meant], "to": to, "parked": deleted}, json=json)


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
@as_json
def backfill(*, target: Target, name: str, topics: tuple[str, ...], start: Start, json: bool) -> None:
    """Handle earlier messages of some topics again, or for the first time, beside a subscription that goes on.

    The workers of NAME handle the messages up to now as a subscription of its own, NAME:backfill, with the policy of
    NAME. It ends by itself when everything is handled and nothing is parked; dead letters keep it until a person
    decides. A message of a key may come before a later message that NAME has handled already: no order is promised
    between the two. What NAME has not reached yet comes twice, and also what direct writers have sent.

    No worker needs to stop. To end it early, drop NAME:backfill.
    """
    from outbox.admin.backfill import backfill as begin

    with target.open_outbox() as channel:
        made = begin(channel, name, topics, start)
    at = start if isinstance(start, str) else moment(start)
    tell(f"{_described(made)}, from {at} up to now; outbox status shows it until its end", _declared(made), json=json)


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--yes", is_flag=True, help="Do not ask.")
@as_json
def drop(*, target: Target, name: str, yes: bool, json: bool) -> None:
    """Forget a subscription, with its position and its parked messages, while no worker runs.

    The subscription of direct writers, NAME:compensation, goes as well. Stop the writers first: the messages that
    writers leave behind are not sent. Of a broadcast consumer all instances go.

    A backfill goes with its subscription. NAME:backfill alone may be dropped while workers run, which ends it early.
    """
    from outbox.admin import commands

    with target.open_outbox() as channel:
        meant, parked = _with_followers(channel, name)
        names = " and ".join(each.name for each in meant)
        lost = f", with the messages that were parked ({_by_state(parked)})" if parked else ""
        then = "A worker of that name would begin anew."
        if meant[0].kind == "check":
            then = "Nobody would be asked about its pending transactions any more; decide them before by outbox half."
        if meant[0].kind == "extract":
            then = "Messages that its archive does not have yet may be purged then."
        if meant[0].kind == "backfill":
            then = "The messages that are left would not be handled again."
        confirmed(f"drop {names}{lost}? {then}", yes=yes)
        dropped = commands.drop(channel, name)
    told = f"{names} {'is' if len(dropped) == 1 else 'are'} dropped{lost}"
    tell(told, {"dropped": dropped, "parked": {state: count.number for state, count in parked.items()}}, json=json)


def _with_followers(
    channel: Channel, name: str, *, backfills: bool = True
) -> tuple[list[Subscription], dict[str, Count]]:
    """Return the subscriptions that a reset or a drop of `name` changes, and how many messages they have parked."""
    from outbox.admin.commands import followers_of
    from outbox.model.parking import STATES
    from outbox.store.operations.parked_status import Count, parked_counts
    from outbox.store.subscriptions.subscriptions import Subscriptions

    meant = Subscriptions(channel).get_all(name)
    meant += followers_of(channel, meant, backfills=backfills)
    found = [parked_counts(channel, each.name) for each in meant]
    parked = {state: Count.total(each[state] for each in found) for state in STATES}
    return meant, {state: count for state, count in parked.items() if count.number}


def _by_state(parked: Mapping[str, object]) -> str:
    return ", ".join(f"{number} {state}" for state, number in parked.items())


def _row(subscription: Subscription, holders: Mapping[Partition, Holder], hold: Hold | None) -> tuple[object, ...]:
    worker = ", ".join(sorted({holder.owner or "" for holder in holders.values() if holder.live})) or "nobody"
    if hold is not None:
        worker = "released" if hold.released else f"held since {moment(hold.since)}"
    return (
        subscription.name,
        _topics(subscription),
        _destination(subscription),
        subscription.on_dead or ("(none yet)" if hold is None else "-"),
        _partitions(subscription) if hold is None else "-",
        moment(subscription.created_at, zone=False),
        worker,
    )


def _partitions(subscription: Subscription) -> str:
    ordered = subscription.next_partitions
    return f"{subscription.partitions}" if ordered is None else f"{subscription.partitions}→{ordered}"


def _destination(subscription: Subscription) -> str:
    if subscription.kind == "check":
        return "(check-back)"
    if subscription.hold is not None and "/" in (subscription.destination or ""):
        return f"archive {subscription.destination}"
    # Without a destination a backfill is that of a consumer.
    if subscription.destination is None and (subscription.is_used or subscription.kind == "backfill"):
        return "(broadcast)" if subscription.kind == "broadcast" else "(consumer)"
    return subscription.destination or "(none yet)"


def _described(subscription: Subscription) -> str:
    return f"{subscription.name}: {_topics(subscription)} to {_destination(subscription)}"


def _topics(subscription: Subscription) -> str:
    if subscription.direct is not None:
        return f"left behind by writers of {subscription.direct}"
    if subscription.kind == "check":
        return f"transactions of {','.join(subscription.tags or ())}"
    return selected(subscription)


def _as_json(subscription: Subscription, holders: Mapping[Partition, Holder], hold: Hold | None) -> dict[str, object]:
    owners = [
        holders[each].owner if each in holders and holders[each].live else None
        for each in subscription.all_partitions()
    ]
    live = None not in owners
    return {
        **_declared(subscription),
        "created_at": subscription.created_at,
        "worker": owners[0] if live else None,
        "live": live,
        "workers": owners,
        "hold_seconds": None if subscription.hold is None else subscription.hold.total_seconds(),
        "held_since": None if hold is None else hold.since,
        "held_until": None if hold is None else hold.until,
        "released": None if hold is None else hold.released,
    }


def _declared(subscription: Subscription) -> dict[str, object]:
    return {
        "name": subscription.name,
        "kind": subscription.kind,
        "topics": subscription.topics,
        "tags": subscription.tags,
        "filter": subscription.filter,
        "destination": subscription.destination,
        "on_dead": subscription.on_dead,
        "grace_seconds": subscription.grace.total_seconds(),
        "partitions": subscription.partitions,
        "next_partitions": subscription.next_partitions,
        "ordered": subscription.ordered,
        "compact": subscription.compact,
    }
