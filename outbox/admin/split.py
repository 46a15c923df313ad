"""Splitting a subscription: some topics go to a new one, which begins exactly where the old one stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from outbox.admin.borrowing import WAIT, changing
from outbox.errors import SubscriptionError
from outbox.model.command import Commands
from outbox.model.subscription import Subscription, base_of, require_own_name, route_name
from outbox.model.topics import Topics, chosen_topics
from outbox.store.database import Channel
from outbox.store.subscriptions.decisions import Decisions, note
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions


def split(
    channel: Channel,
    name: str,
    topics: Sequence[str],
    *,
    destination: str,
    as_name: str | None = None,
    wait: timedelta = WAIT,
    by: str | None = None,
) -> tuple[Subscription, Subscription, int]:
    """Give topics of a subscription to a new one; return the two, and how many parked messages moved.

    In a single transaction the new subscription is created with policy and partitions of the old, each partition at the
    progress of its twin; the old subscription loses the topics; and their parked messages move. So each message is sent
    once. Workers finish their calls and settle before. A worker that declares the lost topics ends then.

    `destination`: as `destination_of` returns it.
    """
    subscriptions = Subscriptions(channel)
    stored = subscriptions.get(name)
    commands = channel.database.commands
    made = _made(stored, topics, base=base_of(name, subscriptions.all()), destination=destination, as_name=as_name)
    moved = Topics.of(made.topics)
    origin = replace(stored, topics=_left(stored, moved, commands))
    if stored.next_partitions is not None:
        raise SubscriptionError(
            f"the number of its partitions is being changed: {name} has {stored.partitions} and will have"
            f" {stored.next_partitions} when all have met; try again after that"
        )
    # Before a worker is asked for its lease; what counts is the same question in the transaction.
    with changing(channel, [stored], wait=wait):
        standing = ProgressLog(channel).standing(stored)
        if subscriptions.get(name) != stored:
            raise SubscriptionError(f"{name} was altered meanwhile; try again")
        subscriptions.alter(origin)
        subscriptions.create_at(made, standing)
        parked = Parked(channel, name).give(made.name, moved)
        Decisions(channel, name).give(made.name)
        choice = {"topics": made.topics, "as": made.name, "destination": destination}
        note(channel, "split", by=by, subscription=name, choice=choice, count=parked)
        made = subscriptions.get(made.name)  # with its own moment of creation
    return origin, made, parked


def _made(
    stored: Subscription, topics: Sequence[str], *, base: str, destination: str, as_name: str | None
) -> Subscription:
    """Return the new subscription."""
    if stored.kind != "relay":
        raise SubscriptionError(f"{stored.name} is no relay but of the kind {stored.kind}, which cannot be split")
    if stored.destination is None:
        raise SubscriptionError(f"{stored.name} has no destination yet: run its relay once, which declares all of it")
    wanted = Topics.of(chosen_topics(topics))
    if wanted.exceptions:
        raise SubscriptionError("topics: a split takes names and patterns, and no exceptions; leave the exceptions out")
    moved = Topics.of(stored.topics).within(wanted.included)
    if moved is None:
        raise SubscriptionError(f"{stored.name} has no topics that match {','.join(wanted.included)}")
    name = route_name(base, ",".join(wanted.included)) if as_name is None else as_name
    require_own_name(name)
    return replace(stored, name=name, topics=moved.chosen(), destination=destination, generation=1)


def _left(stored: Subscription, moved: Topics, commands: Commands) -> tuple[str, ...] | None:
    try:
        return Topics.of(stored.topics).without(moved.included).chosen()
    except SubscriptionError:
        alter = commands.line("subscriptions", "alter", stored.name, "--to", "URL")
        raise SubscriptionError(
            f"{stored.name} would have no topics left; for another destination of all of them run: {alter}"
        ) from None
