"""Subscriptions as values: what one is called, what it handles, and what a worker says that it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from outbox.errors import InvalidMessageError, SubscriptionError
from outbox.model.limits import checked_topic

OnDead = Literal["block", "continue"]
#: What a subscription does: sends; sends what direct writers have left behind; asks what became of transactions; or it
#: stands for a reader outside of the database, which holds retention back for a while.
Kind = Literal["relay", "compensation", "check", "extract"]
#: Where a new subscription starts: "earliest", "latest", or a moment.
Start = Literal["earliest", "latest"] | datetime

_COMPENSATION = ":compensation"


def compensation_of(name: str) -> str:
    """The subscription that finds what direct writers of subscription `name` have left behind."""
    return name + _COMPENSATION


def subscription_of(compensation: str) -> str | None:
    """The subscription whose direct writers a compensation of this name follows; None: no compensation has it."""
    return compensation.removesuffix(_COMPENSATION) if compensation.endswith(_COMPENSATION) else None


def require_own_name(name: str) -> None:
    """Refuse to run a compensation by itself.

    Raises:
        SubscriptionError: it runs beside its subscription, with the same sender.
    """
    own = subscription_of(name)
    if own is not None:
        raise SubscriptionError(
            f"{name} is what the direct writers of {own!r} leave behind; run the relay of that name"
        )


def check_of(group: str) -> str:
    """The subscription that asks what became of the transactions of a producer group."""
    return f"check:{group}"


def chosen_topics(topics: Iterable[str] | None) -> tuple[str, ...] | None:
    """Which topics somebody chose, in order and once each; None: all.

    Raises:
        SubscriptionError: they are one text, none, or such as no message can have: nothing would ever come.
    """
    if topics is None:
        return None
    if isinstance(topics, str):
        raise SubscriptionError(f"topics: must be a list of topics, not one text; pass [{topics!r:.100}]")
    try:
        chosen = tuple(sorted({checked_topic(topic) for topic in topics}))
    except InvalidMessageError as error:
        raise SubscriptionError(f"topics: one {error.limit}; topics are whole names, without wildcards") from None
    if not chosen:
        raise SubscriptionError("topics: must not be empty; pass None for all topics")
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of the log a reader handles.

    `topics`: these; None: all, but for half messages. `tags`: these; None: all. `skips`: not what its writers send
    themselves for the subscription of this name. `only`: nothing else than that.
    """

    topics: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    skips: str | None = None
    only: str | None = None


#: Whatever any writer sends, but for half messages.
EVERYTHING = Selection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a worker says that its subscription is: these things belong to the name, not to the process.

    `destination`: None where it is not known yet. `grace`: rows are read at least so long after their commit; None: as
    stored, or none.
    """

    name: str
    destination: str | None
    kind: Kind = "relay"
    topics: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    on_dead: OnDead | None = None
    grace: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A row of `outbox_subscription`. Destination and policy are None until a first worker declares them.

    `hold`: of an extract, for how long it holds retention back after its last progress.
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

    @property
    def direct(self) -> str | None:
        """Of a compensation: the subscription whose direct writers it follows."""
        return subscription_of(self.name) if self.kind == "compensation" else None

    @property
    def selection(self) -> Selection:
        """What of the log it handles.

        What its writers send themselves it always skips: such rows may appear at any moment, and its compensation
        stands where it was created, behind none of them.
        """
        if self.direct is not None:
            return Selection(topics=self.topics, only=self.direct)
        return Selection(topics=self.topics, tags=self.tags, skips=self.name)
