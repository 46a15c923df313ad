"""Routes: which topics of one outbox go to which destination. Each route is a relay of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from outbox.errors import SubscriptionError
from outbox.model.subscription import OnDead, route_name, subscription_of
from outbox.model.topics import ANYTHING, checked_part, chosen_topics, covers
from outbox.relay.relay import Relay, Source
from outbox.senders.envelopes import EnvelopeName
from outbox.senders.opening import Destination


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where messages of a route go, and how; the fields are those of `Relay`, with `to` for its sender.

    Raises:
        TypeError: the deadline is no timedelta.
    """

    to: Destination
    rename: Mapping[str, str] | None = None
    prefix: str | None = None
    envelope: EnvelopeName = "raw"
    on_dead: OnDead | None = None
    deadline: timedelta | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.deadline, timedelta | None):
            raise TypeError(f"deadline: must be a timedelta, not {self.deadline!r:.60}; write timedelta(seconds=10)")

    @property
    def options(self) -> dict[str, Any]:
        """The fields that are given, as arguments of `Relay`."""
        fields = {
            "rename": self.rename,
            "prefix": self.prefix,
            "envelope": self.envelope,
            "on_dead": self.on_dead,
            "deadline": self.deadline,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RouteSubscription:
    """The subscription of a route: its name, its topics, and the subscription that had them before."""

    name: str
    topics: tuple[str, ...] | None
    split_from: str | None


def routes(
    outbox: Source, table: Mapping[str, Destination | Route], *, name: str = "relay", **options: Any
) -> list[Relay]:
    """Return a relay for each route: `Relays(routes(outbox, {"orders.*": "kafka://…", "*": "nats://…"})).run()`.

    A message takes the first route whose topic or pattern matches its own topic. The subscription of the last route,
    `*`, is `name`; that of `orders.*` is `<name>:orders.*`.

    Args:
        outbox: the relays read its log.
        table: destinations, or `Route` objects, by topic or pattern. The order counts.
        name: of the subscription of the route `*`.
        options: those of `Relay` that all routes share; fields of a `Route` go before.

    Raises:
        SubscriptionError: the last route is not `*`, or a route would never get a message.
    """
    return [
        Relay(
            outbox,
            found.to if isinstance(found, Route) else found,
            name=subscription.name,
            topics=subscription.topics,
            split_from=subscription.split_from,
            **options | (found.options if isinstance(found, Route) else {}),
        )
        for found, subscription in zip(table.values(), route_subscriptions(list(table), name), strict=True)
    ]


def route_subscriptions(patterns: Sequence[str], name: str) -> list[RouteSubscription]:
    """Return the subscription of each route; a route has no topic that one before it has.

    Raises:
        SubscriptionError: the last route is not `*`, or a route would never get a message.
    """
    for number, pattern in enumerate(patterns):
        _check(pattern, patterns[:number])
    if not patterns or patterns[-1] != ANYTHING:
        raise SubscriptionError(
            f"routes: messages of topics that no route takes would never be sent; add the route {ANYTHING!r} as the"
            " last one"
        )
    names = [name if pattern == ANYTHING else route_name(name, pattern) for pattern in patterns]
    for each, pattern in zip(names, patterns, strict=True):
        if subscription_of(each) is not None and pattern != ANYTHING:
            raise SubscriptionError(
                f"routes: the name {each!r} belongs to direct sends; send topic {pattern!r} by a relay of its own, with"
                " another name"
            )
    return [
        RouteSubscription(
            each,
            chosen_topics([pattern, *(f"!{earlier}" for earlier in patterns[:number])]),
            None if pattern == ANYTHING else name,
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
