"""`outbox subscriptions`: the readers of the log, and what belongs to each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.options import NAMES, Target, about_a_database, as_json, confirmed, option, to_a_destination
from outbox.cli.output import say, show_json, show_table

if TYPE_CHECKING:
    from outbox.store.lease import Holder
    from outbox.store.subscription import Subscription

_HEADERS = ("NAME", "TOPICS", "DESTINATION", "ON DEAD", "CREATED", "WORKER")


@click.group(no_args_is_help=True)
def subscriptions() -> None:
    """List, alter and drop the readers of the log."""


@subscriptions.command("list")
@about_a_database
@as_json
def list_(*, target: Target, json: bool) -> None:
    """List the subscriptions: what they read, where they send it, who works on them."""
    from outbox.store.lease import Leases, Partition
    from outbox.store.subscription import Subscriptions

    with target.opened() as (database, channel):
        found = [
            (each, Leases(database).look(channel, Partition(each.name, each.generation)))
            for each in Subscriptions(database).all(channel)
        ]
    if json:
        show_json([_as_json(each, holder) for each, holder in found])
    else:
        show_table(_HEADERS, [_row(each, holder) for each, holder in found])


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--topics", type=NAMES, help="Read these topics only.")
@option("--all-topics", is_flag=True, help="Read all topics.")
@to_a_destination
@option("--on-dead", type=click.Choice(["block", "continue"]), help="Whether a dead letter holds back its key.")
def alter(
    *, target: Target, name: str, topics: tuple[str, ...] | None, all_topics: bool, to: str | None, on_dead: Any
) -> None:
    """Give a subscription other topics, another destination or another policy, while no worker runs.

    A change counts from where the subscription stands: what it has passed already is not read again.
    """
    if topics is not None and all_topics:
        raise click.UsageError("--topics and --all-topics exclude each other")
    if topics is None and not all_topics and to is None and on_dead is None:
        raise click.UsageError("nothing to alter: give --topics, --all-topics, --to or --on-dead")
    from outbox.sender import destination_of
    from outbox.store.subscription import Subscriptions
    from outbox.worker import errand

    destination = None if to is None else destination_of(to)
    with target.opened() as (database, channel):
        stored = Subscriptions(database).get(channel, name)
        if stored.destination is None and destination is None:
            raise click.UsageError(f"{name} has no destination yet: its first worker declares all of it; or say --to")
        changed = replace(
            stored,
            topics=None if all_topics else tuple(sorted(set(topics))) if topics is not None else stored.topics,
            destination=destination or stored.destination,
            on_dead=on_dead or stored.on_dead or "block",
        )
        errand.alter(database, channel, changed)
    say(f"{name}: {_topics(changed)} to {changed.destination}, a dead letter: {changed.on_dead}")


@subscriptions.command()
@about_a_database
@click.argument("name")
@option("--yes", is_flag=True, help="Do not ask.")
def drop(*, target: Target, name: str, yes: bool) -> None:
    """Forget a subscription, with its position and what it has set aside, while no worker runs."""
    from outbox.store.status import parked
    from outbox.store.subscription import Subscriptions
    from outbox.worker import errand

    with target.opened() as (database, channel):
        stored = Subscriptions(database).get(channel, name)
        aside = [f"{count} {state}" for state, count in parked(database, channel, name) if count.number]
        lost = f", with the messages that it has set aside ({', '.join(aside)})" if aside else ""
        confirmed(f"drop {name}{lost}? A worker of that name would begin anew.", yes=yes)
        errand.drop(database, channel, stored)
    say(f"{name} is dropped{lost}")


def _row(subscription: Subscription, holder: Holder | None) -> tuple[object, ...]:
    return (
        subscription.name,
        _topics(subscription),
        subscription.destination or "(none yet)",
        subscription.on_dead or "(none yet)",
        f"{subscription.created_at:%Y-%m-%d %H:%M:%S}",
        holder.owner if holder is not None and holder.live else "nobody",
    )


def _topics(subscription: Subscription) -> str:
    return "all topics" if subscription.topics is None else ",".join(subscription.topics)


def _as_json(subscription: Subscription, holder: Holder | None) -> dict[str, object]:
    live = holder is not None and holder.live
    return {
        "name": subscription.name,
        "topics": subscription.topics,
        "destination": subscription.destination,
        "on_dead": subscription.on_dead,
        "created_at": subscription.created_at,
        "worker": holder.owner if holder is not None and live else None,
        "live": live,
    }
