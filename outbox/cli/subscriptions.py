"""`outbox subscriptions`: the readers of the log, with topics, destination and policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from outbox.cli.groups import Group
from outbox.cli.options import (
    DURATION,
    NAMES,
    Target,
    about_a_database,
    as_json,
    as_value,
    confirmed,
    option,
    to_a_destination,
)
from outbox.cli.output import age, counted, moment, show_json, show_table, tell

if TYPE_CHECKING:
    from outbox.model.lease import Holder, Partition
    from outbox.model.subscription import OnDead, Subscription
    from outbox.store.subscriptions.readers import Hold

_HEADERS = ("NAME", "TOPICS", "DESTINATION", "ON DEAD", "PARTITIONS", "CREATED (UTC)", "WORKER")

_wait_for_lease = option(
    "--wait", type=DURATION, default="30s", help="How long to ask a worker for the lease; 0s: not at all."
)


@click.group(cls=Group, no_args_is_help=True)
def subscriptions() -> None:
    """List, alter, split and drop the readers of the log."""


@subscriptions.command("list")
@about_a_database
@as_json
def list_(*, target: Target, json: bool) -> None:
    """List the subscriptions: topics, destination, policy, worker."""
    from outbox.store.subscriptions.leases import Leases
    from outbox.store.subscriptions.readers import Readers
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        found = [
            (each, Leases(channel).look_all(each.all_partitions()), Readers(channel).hold(each))
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
    """Give a subscription other topics, another destination, another policy or another number of partitions.

    Topics of another route of the same relay are refused, because both routes would send the messages.

    Workers may run: the worker with the lease finishes its calls and pauses for the change. A worker with another
    declaration ends then; with several databases or routes, or in an application, the worker tries again instead.

    A change counts from the position of the subscription: earlier messages are not read again.

    With --on-dead continue the messages behind present dead letters go on, too, in their order; the dead letters stay.
    With --on-dead block later dead letters hold back their keys, present dead letters do not.

    Another number of partitions counts as soon as all partitions stand at the same position. A single partition does at
    once. Several are handled up to the foremost position, by the running relays, before any goes on. The command waits
    as long as --wait says; the relays do not need the command. The present number takes the change back.
    """
    others = {change.topics, to, change.on_dead, change.grace, change.ordered, change.compact} - {None}
    if change.partitions is None and not others:
        raise click.UsageError(
            "nothing to alter: give --topics, --to, --on-dead, --grace, --ordered, --compact or --partitions"
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
    from outbox.model.topics import chosen_topics

    destination = None if to is None else _checked_destination(to, stored)
    if stored.destination is None and destination is None and stored.direct is None:
        raise click.UsageError(
            f"{stored.name} has no destination yet: its first worker declares all of it; or say --to"
        )
    return replace(
        stored,
        topics=stored.topics if change.topics is None else chosen_topics(change.topics),
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
@option("--yes", is_flag=True, help="Do not ask.")
@as_json
def drop(*, target: Target, name: str, yes: bool, json: bool) -> None:
    """Forget a subscription, with its position and its parked messages, while no worker runs.

    The subscription of direct writers, NAME:compensation, goes as well. Stop the writers first: the messages that
    writers leave behind are not sent.
    """
    from outbox.admin import commands
    from outbox.model.subscription import compensation_of
    from outbox.store.operations.parked_status import parked_counts
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        stored = Subscriptions(channel).get(name)
        dropped = [each for each in (name, compensation_of(name)) if Subscriptions(channel).find(each) is not None]
        parked = [each for of in dropped for each in parked_counts(channel, of).items() if each[1].number]
        names = " and ".join(dropped)
        shown = ", ".join(f"{count} {state}" for state, count in parked)
        lost = f", with the messages that were parked ({shown})" if parked else ""
        then = "A worker of that name would begin anew."
        if stored.kind == "check":
            then = "Nobody would be asked about its pending transactions any more; decide them before by outbox half."
        if stored.kind == "extract":
            then = "Messages that its archive does not have yet may be purged then."
        confirmed(f"drop {names}{lost}? {then}", yes=yes)
        commands.drop(channel, stored)
    numbers = Counter[str]()
    for state, count in parked:
        numbers[state] += count.number
    told = f"{names} {'is' if len(dropped) == 1 else 'are'} dropped{lost}"
    tell(told, {"dropped": dropped, "parked": numbers}, json=json)


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
    if subscription.hold is not None:
        return f"archive {subscription.destination}"
    if subscription.kind in ("consumer", "broadcast"):
        return f"({subscription.kind})"
    return subscription.destination or "(none yet)"


def _described(subscription: Subscription) -> str:
    return f"{subscription.name}: {_topics(subscription)} to {_destination(subscription)}"


def _topics(subscription: Subscription) -> str:
    if subscription.direct is not None:
        return f"left behind by writers of {subscription.direct}"
    if subscription.kind == "check":
        return f"transactions of {','.join(subscription.tags or ())}"
    return "all topics" if subscription.topics is None else ",".join(subscription.topics)


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
        "destination": subscription.destination,
        "on_dead": subscription.on_dead,
        "grace_seconds": subscription.grace.total_seconds(),
        "partitions": subscription.partitions,
        "next_partitions": subscription.next_partitions,
        "ordered": subscription.ordered,
        "compact": subscription.compact,
    }
