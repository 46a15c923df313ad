"""Routes: the topics of an outbox, each with a destination. Each route is a relay of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Unpack

from outbox.errors import SubscriptionError
from outbox.model.filter.sql92 import chosen_filter
from outbox.model.filter.tags import chosen_tags
from outbox.model.subscription import Declaration, OnDead, route_name, subscription_of
from outbox.model.topics import ANYTHING, checked_part, chosen_topics, covers
from outbox.senders.envelopes import EnvelopeName
from outbox.senders.form import Form
from outbox.senders.opening import Destination, OpenedSender, SenderOptions, open_sender


class RouteOptions(SenderOptions, total=False):
    """The fields of a `Route` that all routes may share."""

    on_dead: OnDead | None
    partitions: int | None
    compact: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The destination of a route, and how messages are sent; the fields are those of `Relay`, with `to` for the sender.

    `partitions`: how many workers may share a new subscription; None: as stored, else one. `compact`: only the newest
    message of a key is sent; None: as stored, else all. `tags` and `filter`: which messages of the topics are sent; the
    others are sent by no route.

    Raises:
        SenderError: no topic can be made so, or the envelope is unknown.
        FilterError: tags or filter cannot be read; the error shows the place.
    """

    to: Destination
    rename: Mapping[str, str] | None = None
    prefix: str | None = None
    envelope: EnvelopeName | None = None
    on_dead: OnDead | None = None
    deadline: timedelta | None = None
    partitions: int | None = None
    compact: bool | None = None
    tags: str | None = None
    filter: str | None = None

    def __post_init__(self) -> None:
        Form(rename=self.rename, prefix=self.prefix, envelope=self.envelope or "raw")
        chosen_tags(self.tags)
        chosen_filter(self.filter)

    def over(self, shared: RouteOptions) -> Route:
        """Return the route with missing fields taken from the shared ones."""
        missing: dict[str, Any] = {name: value for name, value in shared.items() if getattr(self, name, None) is None}
        return replace(self, **missing)

    def open(self) -> OpenedSender:
        """Open the destination."""
        return open_sender(
            self.to,
            rename=self.rename,
            prefix=self.prefix,
            envelope=self.envelope or "raw",
            deadline=self.deadline,
        )


#: The routes of one outbox in their order, each with its subscription, as far as that is known before it is opened.
Plan = Sequence[tuple[Route, Declaration]]


def planned(table: Mapping[str, Route], name: str, **shared: Unpack[RouteOptions]) -> Plan:
    """Return the routes with their subscriptions; arguments and errors as in `routes`."""
    each = [route.over(shared) for route in table.values()]
    return list(zip(each, route_subscriptions(list(table), name), strict=True))


def opened(plan: Plan) -> list[tuple[OpenedSender, Declaration]]:
    """Open the destination of each route; return each sender with the declaration of its relay.

    While one route cannot begin, none begins; so each declaration holds all of them.
    """
    senders = [route.open() for route, _ in plan]
    every = [
        replace(
            own,
            destination=sender.destination,
            on_dead=route.on_dead,
            partitions=route.partitions,
            compact=route.compact,
            tags=chosen_tags(route.tags),
            filter=chosen_filter(route.filter),
        )
        for sender, (route, own) in zip(senders, plan, strict=True)
    ]
    beside = tuple(every) if len(every) > 1 else ()
    return [(sender, replace(own, beside=beside)) for sender, own in zip(senders, every, strict=True)]


def route_subscriptions(patterns: Sequence[str], name: str) -> list[Declaration]:
    """Return the subscription of each route; a route has no topic of an earlier route."""
    for number, pattern in enumerate(patterns):
        _check(pattern, patterns[:number])
    if not patterns or patterns[-1] != ANYTHING:
        raise SubscriptionError(
            f"routes: messages of topics that no route takes would never be sent; add the route {ANYTHING!r} as the"
            " last one"
        )
    # In the form that is stored, so that two ways to write a pattern have one name.
    parts = [(chosen_topics([pattern]) or [ANYTHING])[0] for pattern in patterns]
    names = [name if part == ANYTHING else route_name(name, part) for part in parts]
    for each, pattern in zip(names, patterns, strict=True):
        if subscription_of(each) is not None and pattern != ANYTHING:
            raise SubscriptionError(
                f"routes: the name {each!r} belongs to a backfill; send topic {pattern!r} by a relay of its own, with"
                " another name"
            )
    return [
        Declaration(
            name=each,
            destination=None,
            topics=chosen_topics([pattern, *(f"!{earlier}" for earlier in patterns[:number])]),
            split_from=None if pattern == ANYTHING else name,
        )
        for number, (pattern, each) in enumerate(zip(patterns, names, strict=True))
    ]


def _check(pattern: str, before: Sequence[str]) -> None:
    try:
        checked_part(pattern)
    except SubscriptionError as error:
        raise SubscriptionError(f"routes: {str(error).removeprefix('topics: ')}") from None
    if pattern.startswith("!"):
        raise SubscriptionError(f"routes: {pattern!r} is an exception; put a route for these topics before the others")
    for earlier in before:
        if covers(earlier, pattern):
            raise SubscriptionError(
                f"routes: {pattern!r} would never get a message, because {earlier!r} before it takes all of its topics;"
                " put it before that one, or leave it out"
            )
