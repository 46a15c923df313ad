"""Subscriptions as values: names, selections, and the declarations of workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, get_args

from outbox.errors import SubscriptionError
from outbox.model.lease import Partition
from outbox.model.limits import require_flags
from outbox.model.pausing import Pause, Pauses
from outbox.model.position import Position

OnDead = Literal["block", "continue"]
#: The task of a subscription. relay: send. check: ask about transactions. extract: stand for a reader outside the
#: database, which holds retention back for a while. consumer: call listeners. broadcast: call the listeners of one
#: instance; each instance of the consumer gets every message. backfill: do for earlier messages the task of another
#: subscription, up to a position, and end there.
Kind = Literal["relay", "check", "extract", "consumer", "broadcast", "backfill"]
#: Kinds whose messages go to functions of an application, if there is no destination.
_CALLED: tuple[Kind, ...] = ("consumer", "broadcast", "backfill")
#: Names are parts of primary keys, which have room for so many bytes beside a message key.
_LONGEST_NAME = 1_000
#: The start of a new subscription: "earliest", "latest", or a moment.
Start = Literal["earliest", "latest"] | datetime

_BACKFILL = ":backfill"
#: Between the name of a broadcast consumer, and its instance.
AT = "@"


def require_words(**words: tuple[object, tuple[str, ...]]) -> None:
    """Refuse a value that is none of the known words; by the name of the argument."""
    for name, (word, known) in words.items():
        if word not in known:
            raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, not {word!r:.40}")


def require_policy(on_dead: object) -> None:
    """Refuse a policy for dead letters that is unknown; None: as stored."""
    require_words(on_dead=("block" if on_dead is None else on_dead, get_args(OnDead)))


def require_ordering(ordered: object, compact: object) -> None:
    """Refuse a value that is neither True nor False; None: as stored."""
    require_flags(ordered=ordered is not None and ordered, compact=compact is not None and compact)


def require_start(start: object) -> None:
    """Refuse a start that is neither a known word nor a moment with a time zone; None: no start."""
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise ValueError(f"start must have a time zone, unlike {start}; write datetime(…, tzinfo=UTC)")
    elif start not in (None, "earliest", "latest"):
        raise ValueError(f"start must be 'earliest', 'latest' or a moment, not {start!r:.40}")


def backfill_of(name: str) -> str:
    """Return the name of the backfill of subscription `name`."""
    return name + _BACKFILL


def subscription_of(follower: str) -> str | None:
    """Return the subscription of a backfill; None for any other name."""
    return follower.removesuffix(_BACKFILL) if follower.endswith(_BACKFILL) else None


def route_name(name: str, pattern: str) -> str:
    """Return the name of the route of `pattern`, whose topics were split from subscription `name`."""
    return f"{name}:{pattern}"


def grace_milliseconds(grace: timedelta) -> int:
    """Return a grace as stored: rounded up."""
    return -(-grace // timedelta(milliseconds=1))


def require_own_name(name: str) -> None:
    """Refuse a name that no relay or consumer can have.

    The workers of a subscription do the work of its backfill, and a check-back has a name that is made from its
    producer group.
    """
    if not (name.isprintable() and 0 < len(name.encode()) <= _LONGEST_NAME):
        shown = ascii(name[:40])
        raise SubscriptionError(f"name: must be 1 to {_LONGEST_NAME} bytes of text that can be printed, not {shown}")
    # Commands about such a name could not be given as they are advised.
    if name.startswith("--"):
        raise SubscriptionError(f"name: {name} begins as an option of the command line does; use another name")
    if name.startswith(check_of("")):
        raise SubscriptionError(f"name: {name} is the check-back of a producer group; use another name")
    own = subscription_of(name)
    if own is not None:
        raise SubscriptionError(f"{name} is the backfill of {own!r}, whose workers do its work; run {own!r}")


def check_of(group: str) -> str:
    """Return the name of the subscription that checks back on the transactions of a producer group."""
    return f"check:{group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of the log that a reader handles.

    `topics`: in the form of `chosen_topics`; None: all except half messages. `tags`: the tags, as of `chosen_tags`;
    None: all. `filter`: a condition in SQL92; None: none. All three have to be true.
    """

    topics: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    filter: str | None = None


#: All messages of all writers, except half messages.
EVERYTHING = Selection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The properties of a subscription as a worker declares them. They belong to the name, not to the process.

    `destination`: None while unknown. `grace`: rows are read at least this long after their commit; None: as stored,
    else no grace. `split_from`: the subscription that had the topics before, or whose other routes had them; the
    position is then taken over, too. `beside`: the routes of the same process; if one route cannot begin, none begins.
    `partitions`: the number of partitions; None: as stored, else one. `ordered`: a message waits for earlier messages
    of the key; None: as stored, else True. `compact`: of messages that are read together, only the newest of each topic
    and key is handled; None: as stored, else False.
    """

    name: str
    destination: str | None
    kind: Kind = "relay"
    topics: tuple[str, ...] | None = None
    tags: tuple[str, ...] | None = None
    filter: str | None = None
    on_dead: OnDead | None = None
    grace: timedelta | None = None
    split_from: str | None = None
    beside: tuple[Declaration, ...] = ()
    partitions: int | None = None
    ordered: bool | None = None
    compact: bool | None = None

    def __post_init__(self) -> None:
        require_policy(self.on_dead)
        require_ordering(self.ordered, self.compact)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader of the log: the task, the part of the log, the destination, and what people hold back.

    Attributes:
        name: of the subscription.
        kind: `relay`, `check`, `consumer`, `broadcast`, `backfill` or `extract`.
        topics: of the selection; None: all topics.
        tags: of the selection; None: all tags.
        filter: of the selection; None: no filter.
        destination: None: nobody has run the subscription yet, or a consumer.
        next_partitions: how many partitions there will be when those that there are have met.
        pauses: what people hold back.
    """

    name: str
    kind: Kind = "relay"
    topics: tuple[str, ...] | None
    tags: tuple[str, ...] | None = None
    filter: str | None = None
    destination: str | None
    next_partitions: int | None = None
    pauses: Pauses = ()

    @property
    def pause(self) -> Pause | None:
        """The order to handle no message, or fewer a second; None: there is no such order."""
        return next((each for each in self.pauses if each.key is None), None)

    @property
    def is_paused(self) -> bool:
        """True while no message is handled, by order of a person."""
        return self.pause is not None and self.pause.rate is None

    @property
    def is_used(self) -> bool:
        """True when a worker has declared the subscription; the first migration creates a relay for nobody yet."""
        return self.destination is not None or self.kind in _CALLED

    @property
    def follows(self) -> str | None:
        """The subscription of this backfill; None for every other kind."""
        return subscription_of(self.name) if self.kind == "backfill" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription(Reader):
    """A row of `outbox_subscription`. Destination and policy are None until a first worker declares them.

    `hold`: for how long an extract holds retention back after its last progress. `stop_at`: the partitions handle the
    log up to this position; when all have arrived, their number becomes `next_partitions`. Both are None while no other
    number is ordered. A backfill has no other number: it ends at `stop_at`. `ordered`, `compact`: as in `Declaration`.
    """

    on_dead: OnDead | None
    partitions: int
    generation: int
    created_at: datetime
    grace: timedelta = timedelta(0)
    hold: timedelta | None = None
    stop_at: Position | None = None
    ordered: bool = True
    compact: bool = False

    @property
    def selection(self) -> Selection:
        """The part of the log that the subscription handles."""
        return Selection(topics=self.topics, tags=self.tags, filter=self.filter)

    def partition(self, number: int) -> Partition:
        """Return a partition by its number, from 0 on."""
        return Partition(self.name, self.generation, number, self.partitions)

    def all_partitions(self) -> list[Partition]:
        """Return all partitions, in the order of their numbers."""
        return [self.partition(number) for number in range(self.partitions)]


def place_of(each: Declaration | Reader, whose: str = "its") -> str:
    """Return in words where messages of a subscription go. `whose`: its or their, of the messages."""
    called = each.kind in _CALLED
    return each.destination or f"{whose} {'consumer' if called else 'destination'}"


def base_of(name: str, known: Iterable[Reader]) -> str:
    """Return the relay of a route, such as `relay` for `relay:orders.*`; return any other `name` itself."""
    relays = {each.name for each in known if each.kind == "relay"}
    shorter = (name[:at] for at, letter in enumerate(name) if letter == ":")
    return next((each for each in shorter if each in relays), name)


def routes_of(base: str, known: Iterable[Subscription]) -> list[Subscription]:
    """Return the relay `base` and its routes, as far as they have begun."""
    return [
        each
        for each in known
        if each.kind == "relay"
        and each.destination is not None
        and (each.name == base or each.name.startswith(route_name(base, "")))
    ]
