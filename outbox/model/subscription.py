"""Subscriptions as values: their names, what they select of the log, and what a worker declares them to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from outbox.errors import SubscriptionError
from outbox.model.lease import Partition
from outbox.model.position import Position

OnDead = Literal["block", "continue"]
#: The task of a subscription. relay: it sends. compensation: it sends what direct writers have left behind. check: it
#: asks what became of transactions. extract: it stands for a reader outside of the database, which holds retention
#: back for a while.
Kind = Literal["relay", "compensation", "check", "extract"]
#: The start of a new subscription: "earliest", "latest", or a moment.
Start = Literal["earliest", "latest"] | datetime

_COMPENSATION = ":compensation"


def compensation_of(name: str) -> str:
    """Return the name of the subscription that finds what direct writers of subscription `name` have left behind."""
    return name + _COMPENSATION


def subscription_of(compensation: str) -> str | None:
    """Return the name of the subscription whose direct writers the compensation of this name follows.

    None if no compensation can have this name.
    """
    return compensation.removesuffix(_COMPENSATION) if compensation.endswith(_COMPENSATION) else None


def route_name(name: str, pattern: str) -> str:
    """Return the name of the subscription for topics that were taken out of subscription `name`."""
    return f"{name}:{pattern}"


def grace_milliseconds(grace: timedelta) -> int:
    """Return a grace as it is stored, which is never shorter."""
    return -(-grace // timedelta(milliseconds=1))


def require_own_name(name: str) -> None:
    """Refuse to run a compensation by itself, because it runs beside its subscription, with the same sender.

    Raises:
        SubscriptionError: `name` is the name of a compensation.
    """
    own = subscription_of(name)
    if own is not None:
        raise SubscriptionError(f"{name} is the compensation of {own!r}, which its relay does; run the relay {own!r}")


def check_of(group: str) -> str:
    """Return the name of the subscription that asks what became of the transactions of a producer group."""
    return f"check:{group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of the log that a reader handles.

    `topics`: only these, in the form of `chosen_topics`; None: all except half messages. `tags`: only these; None: all.
    `skips`: without the messages that their writers send themselves for the subscription of this name. `only`: nothing
    but the messages that their writers send themselves for the subscription of this name.
    """

    topics: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    skips: str | None = None
    only: str | None = None


#: All messages of all writers, except half messages.
EVERYTHING = Selection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The properties of a subscription as a worker declares them. They belong to its name, not to the process.

    `destination`: None where it is not known yet. `grace`: rows are read at least this long after their commit; None:
    as stored, else no grace. `split_from`: the subscription from which this one takes its topics, if that one had them
    before, or one of the routes that were split from it; the position then has to be taken over, too. `beside`: the
    routes of the same process; while one of them cannot begin, none begins. `partitions`: how many it has; None: as
    stored, else one.
    """

    name: str
    destination: str | None
    kind: Kind = "relay"
    topics: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    on_dead: OnDead | None = None
    grace: timedelta | None = None
    split_from: str | None = None
    beside: tuple[Declaration, ...] = ()
    partitions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A row of `outbox_subscription`. Destination and policy are None until a first worker declares them.

    `hold`: of an extract, for how long it holds retention back after its last progress. `stop_at`: the partitions
    handle the log up to this position; when all of them stand there, there will be `next_partitions` of them. Both are
    None while nobody has ordered another number.
    """

    name: str
    topics: tuple[str, ...] | None
    destination: str | None
    on_dead: OnDead | None
    partitions: int
    generation: int
    created_at: datetime
    grace: timedelta = timedelta(0)
    kind: Kind = "relay"
    tags: tuple[str, ...] | None = None
    hold: timedelta | None = None
    stop_at: Position | None = None
    next_partitions: int | None = None

    @property
    def direct(self) -> str | None:
        """The name of the subscription whose direct writers this compensation follows; None for every other kind."""
        return subscription_of(self.name) if self.kind == "compensation" else None

    @property
    def selection(self) -> Selection:
        """The part of the log that it handles.

        A subscription always skips what its writers send themselves, because such rows may appear at any moment. Its
        compensation handles them: that one starts where it was created, before all of them.
        """
        if self.direct is not None:
            return Selection(topics=self.topics, only=self.direct)
        return Selection(topics=self.topics, tags=self.tags, skips=self.name)

    def partition(self, number: int) -> Partition:
        """Return one of its partitions, from 0 on."""
        return Partition(self.name, self.generation, number, self.partitions)

    def all_partitions(self) -> list[Partition]:
        """Its partitions, in the order of their numbers."""
        return [self.partition(number) for number in range(self.partitions)]


def base_of(name: str, known: Iterable[Subscription]) -> str:
    """Return the subscription that `name` is a route of, such as `relay` for `relay:orders.*`; else `name`."""
    relays = {each.name for each in known if each.kind == "relay"}
    shorter = (name[:at] for at, letter in enumerate(name) if letter == ":")
    return next((each for each in shorter if each in relays), name)


def routes_of(base: str, known: Iterable[Subscription]) -> list[Subscription]:
    """Return the relay `base`, and those that have its routes, as far as they have begun."""
    return [
        each
        for each in known
        if each.kind == "relay"
        and each.destination is not None
        and (each.name == base or each.name.startswith(route_name(base, "")))
    ]
