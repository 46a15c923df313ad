"""Subscriptions for an operator: listed, made, and given other properties."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypedDict

from outbox.admin import commands
from outbox.admin.earlier import tell_passed
from outbox.admin.repartition import repartition
from outbox.admin.results import SubscriptionDetails
from outbox.errors import SubscriptionError
from outbox.model.filter.sql92 import chosen_filter
from outbox.model.filter.tags import chosen_tags
from outbox.model.limits import require_notes, require_wait
from outbox.model.parking import STATES
from outbox.model.subscription import (
    Declaration,
    OnDead,
    Start,
    Subscription,
    require_ordering,
    require_own_name,
    require_policy,
    require_start,
)
from outbox.model.topics import chosen_topics
from outbox.runtime.keywords import require_known
from outbox.senders.opening import is_offered, open_sender
from outbox.senders.port import destination_of
from outbox.store.database import Channel
from outbox.store.operations.parked_status import parked_counts
from outbox.store.operations.status import properties_of
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions


class Properties(TypedDict, total=False):
    """The properties of a subscription; what is left out stays as it is, or has the default of a relay.

    `topics`: names and patterns such as `orders.*`. `tags`, `filter`: the rest of the selection. `destination`: a URL.
    `on_dead`: whether a dead letter holds back its key. `grace`: the time from the commit until a message may be read.
    `ordered`: a message waits for earlier messages of its key. `compact`: only the newest of a key's waiting messages
    is handled. `partitions`: how many workers may share the messages; a change of its own.
    """

    topics: Iterable[str] | None
    tags: str | None
    filter: str | None
    destination: str | None
    on_dead: OnDead | None
    grace: timedelta | None
    ordered: bool | None
    compact: bool | None
    partitions: int | None


def details(channel: Channel, found: Sequence[Subscription]) -> tuple[SubscriptionDetails, ...]:
    """Return subscriptions with their workers."""
    return tuple(_details(channel, each) for each in found)


def create(channel: Channel, name: str, start: Start, properties: Properties) -> Subscription:
    """Make the subscription of a relay; return the stored subscription, also if the same was there before.

    Raises:
        SubscriptionError: a subscription of this name has other properties; a route of the same relay has the topics; a
            destination is missing; or the name is that of a backfill.
    """
    require_known("create", properties, ("start", *Properties.__annotations__))
    require_own_name(name)
    require_start(start)
    _require_grace(properties)
    destination = properties.get("destination")
    if destination is None:
        raise SubscriptionError("destination: a new subscription needs a URL, as nats://host:4222")
    declared = Declaration(
        name=name,
        destination=checked_destination(destination, None),
        topics=chosen_topics(properties.get("topics")),
        tags=chosen_tags(properties.get("tags")),
        filter=chosen_filter(properties.get("filter")),
        on_dead=properties.get("on_dead"),
        grace=properties.get("grace"),
        partitions=properties.get("partitions"),
        ordered=properties.get("ordered"),
        compact=properties.get("compact"),
    )
    return Subscriptions(channel).declare(declared, start)


def alter(
    channel: Channel, name: str, wait: timedelta, properties: Properties, *, by: str | None = None
) -> Subscription:
    """Give a subscription other properties, or another number of partitions; see `commands.alter` and `repartition`.

    A wider selection counts from the position on; the log names the backfill for earlier messages.

    Raises:
        SubscriptionError: no property is given, or the number of partitions with another property; and all errors of
            the two.
    """
    require_known("alter", properties, ("wait", "by", *Properties.__annotations__))
    require_notes(by=by)
    given = {each for each, value in properties.items() if value is not None}
    partitions = properties.get("partitions")
    if not given or (partitions is not None and len(given) > 1):
        raise SubscriptionError("alter: give one property or several; partitions is a change of its own")
    if partitions is not None:
        return repartition(channel, name, partitions, wait=wait, by=by)
    stored = Subscriptions(channel).get(name)
    altered = commands.alter(channel, _changed(stored, properties), before=stored, wait=wait, by=by)
    tell_passed(channel, stored, altered)
    return altered


def checked_destination(to: str, stored: Subscription | None) -> str:
    """Return a destination in its stored form. The URL is checked as by `outbox relay`, without a connection."""
    # Senders and functions of an application are opened there only; a sender may call itself `shop://orders`.
    known = stored.destination if stored is not None else None
    own = ("sender", "callable", (known or "").partition(":")[0])
    if to.partition(":")[0] in own and not is_offered(to):
        return destination_of(to)
    opened = open_sender(to)
    opened.close()
    return opened.destination


def with_followers(channel: Channel, name: str, *, backfills: bool = True) -> tuple[list[Subscription], dict[str, int]]:
    """Return the subscriptions that a reset or a drop of `name` changes, and how many messages they have parked."""
    meant = Subscriptions(channel).get_all(name)
    if backfills:
        meant += commands.backfills_of(channel, meant)
    found = [parked_counts(channel, each.name) for each in meant]
    parked = {state: sum(each[state].number for each in found) for state in STATES}
    return meant, {state: number for state, number in parked.items() if number}


def _changed(stored: Subscription, wanted: Properties) -> Subscription:
    require_policy(wanted.get("on_dead"))
    require_ordering(wanted.get("ordered"), wanted.get("compact"))
    _require_grace(wanted)
    destination = wanted.get("destination")
    checked = None if destination is None else checked_destination(destination, stored)
    if not stored.is_used and checked is None:
        raise SubscriptionError(
            f"{stored.name} has no destination yet: its first worker declares all of it; or say --to (in Python:"
            " destination=…)"
        )
    chosen: dict[str, Callable[[Any], Any]] = {"topics": chosen_topics, "tags": chosen_tags, "filter": chosen_filter}
    changes: dict[str, Any] = {
        name: chosen[name](value) if name in chosen else value for name, value in wanted.items() if value is not None
    }
    changes["destination"] = checked or stored.destination
    return replace(stored, **{"on_dead": stored.on_dead or "block", **changes})


def _require_grace(wanted: Properties) -> None:
    if (grace := wanted.get("grace")) is not None:
        require_wait("grace", grace)


def _details(channel: Channel, stored: Subscription) -> SubscriptionDetails:
    holders = Leases(channel).look_all(stored.all_partitions())
    owners = tuple(
        holders[each].owner if each in holders and holders[each].live else None for each in stored.all_partitions()
    )
    return SubscriptionDetails(
        **properties_of(channel, stored, SubscriptionDetails),
        live=None not in owners,
        workers=owners,
        hold_seconds=None if stored.hold is None else stored.hold.total_seconds(),
    )
