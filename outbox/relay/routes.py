"""Routes: which topics of one outbox go to which destination. Each route is a relay of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Unpack

from outbox.errors import SubscriptionError
from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Declaration, OnDead, Start, route_name, subscription_of
from outbox.model.topics import ANYTHING, checked_part, chosen_topics, covers
from outbox.relay.relay import Relay, Source
from outbox.senders.envelopes import EnvelopeName
from outbox.senders.form import Form
from outbox.senders.opening import Destination, OpenedSender, SenderOptions, open_sender
from outbox.worker.settings import Settings


class RouteOptions(SenderOptions, total=False):
    """What all routes may share: the fields of a `Route`, except where it goes."""

    on_dead: OnDead | None
    partitions: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where messages of a route go, and how; the fields are those of `Relay`, with `to` for its sender.

    `partitions`: how many workers may share its subscription, from when it is new; None: as stored, else one.

    Raises:
        SenderError: no topic can be made so, or there is no such envelope.
    """

    to: Destination
    rename: Mapping[str, str] | None = None
    prefix: str | None = None
    envelope: EnvelopeName | None = None
    on_dead: OnDead | None = None
    deadline: timedelta | None = None
    partitions: int | None = None

    def __post_init__(self) -> None:
        Form(rename=self.rename, prefix=self.prefix, envelope=self.envelope or "raw")

    def over(self, shared: RouteOptions) -> Route:
        """Return the route with what it does not say itself taken from what all routes share."""
        missing: dict[str, Any] = {name: value for name, value in shared.items() if getattr(self, name, None) is None}
        return replace(self, **missing)

    def open(self) -> OpenedSender:
        """Open its destination."""
        return open_sender(
            self.to,
            rename=self.rename,
            prefix=self.prefix,
            envelope=self.envelope or "raw",
            deadline=self.deadline,
        )


@dataclass(frozen=True, slots=True)
class RouteSubscription:
    """The subscription of a route: its name, its topics, and the subscription that had them before."""

    name: str
    topics: tuple[str, ...] | None
    split_from: str | None

    def declared(self, destination: str, route: Route) -> Declaration:
        """Return what the relay of the route declares, so that the others can check it too."""
        return Declaration(
            name=self.name,
            destination=destination,
            topics=self.topics,
            on_dead=route.on_dead,
            split_from=self.split_from,
            partitions=route.partitions,
        )


#: The routes of one outbox in their order, each with its subscription.
Plan = Sequence[tuple[Route, RouteSubscription]]


def routes(
    outbox: Source,
    table: Mapping[str, Destination | Route],
    *,
    name: str = "relay",
    start: Start = "earliest",
    retry: RetryPolicy | None = None,
    settings: Settings | None = None,
    **shared: Unpack[RouteOptions],
) -> list[Relay]:
    """Return a relay for each route: `Relays(routes(outbox, {"orders.*": "kafka://…", "*": "nats://…"})).run()`.

    A message takes the first route whose topic or pattern matches its own topic. The subscription of the last route,
    `*`, is `name`; that of `orders.*` is `<name>:orders.*`.

    Args:
        outbox: the relays read its log.
        table: destinations, or `Route` objects, by topic or pattern. The order counts.
        name: of the subscription of the route `*`.
        start, retry, settings: of each relay, as `Relay` has them.
        shared: fields of a `Route` for those that do not have them.

    Raises:
        SubscriptionError: the last route is not `*`, or a route would never get a message.
    """
    given = {pattern: to if isinstance(to, Route) else Route(to=to) for pattern, to in table.items()}
    return [
        Relay(outbox, sender, declared=declared, start=start, retry=retry, settings=settings)
        for sender, declared in opened(planned(given, name, **shared))
    ]


def planned(table: Mapping[str, Route], name: str, **shared: Unpack[RouteOptions]) -> Plan:
    """Return the routes with their subscriptions; arguments and errors as those of `routes`."""
    each = [route.over(shared) for route in table.values()]
    return list(zip(each, route_subscriptions(list(table), name), strict=True))


def opened(plan: Plan) -> list[tuple[OpenedSender, Declaration]]:
    """Open the destination of each route; return it with what its relay declares.

    While one of several routes cannot begin, none begins; so each declaration holds those of all.
    """
    senders = [route.open() for route, _ in plan]
    every = [each.declared(sender.destination, route) for sender, (route, each) in zip(senders, plan, strict=True)]
    beside = tuple(every) if len(every) > 1 else ()
    return [(sender, replace(own, beside=beside)) for sender, own in zip(senders, every, strict=True)]


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
    # In the form that is stored, so that two ways to write a pattern have one name.
    parts = [(chosen_topics([pattern]) or [ANYTHING])[0] for pattern in patterns]
    names = [name if part == ANYTHING else route_name(name, part) for part in parts]
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
