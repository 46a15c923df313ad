"""Events: values for what happened, told to whoever listens, on the thread where it happened."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

from sqlalchemy import Engine

from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.verdict import Verdict

logger = logging.getLogger("outbox")


class Origin(Protocol):
    """The database of an outbox, as events name it."""

    @property
    def engine(self) -> Engine:
        """The engine by which workers reach the tables."""

    @property
    def schema(self) -> str | None:
        """The tables' schema; None: the first of the search path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Messages were written to the log, in a transaction that is still open.

    `connection`: the one that the transaction is on, SQLAlchemy's or psycopg's own. A repetition of a dedup key is not
    written. Half messages, and what is restored from them, have no such events.
    """

    database: Origin
    connection: object
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A transaction in which messages were written has committed.

    `messages`: those that were `Written`, without what was rolled back to a savepoint. `seconds`: how long the COMMIT
    took. The transactions of a psycopg connection of the application's own are not noticed.
    """

    database: Origin
    messages: Sequence[Message]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """Messages that were `Written` are gone: with their transaction, with a savepoint, or because the COMMIT failed.

    A COMMIT also fails when its connection is lost. Then the database may have committed nevertheless.
    """

    database: Origin
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worked:
    database: Origin
    subscription: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfPartition(_Worked):
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken(_OfPartition):
    """This worker owns a partition from now on. `epoch`: the number of the lease, greater than any before it."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(_OfPartition):
    """This worker owns a partition no longer. `error`: why; None if the worker has given the lease back."""

    epoch: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRead(_OfPartition):
    """A batch of messages was read from the log. `now`: the database's clock at this moment."""

    messages: Sequence[Message]
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver(_Worked):
    """A call of the handler has come back, in time or late. Told on the thread that made the call.

    `verdicts`: one for each message, in their order; None if the handler raised. `error`: what it raised, in words.
    `seconds`: how long the call took. Until a message is `Settled`, it may be handed over again.
    """

    messages: Sequence[Message]
    verdicts: Sequence[Verdict] | None
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(_OfPartition):
    """It is stored that messages are done: no worker handles them again. `seconds`: how long it took to store that."""

    messages: Sequence[Message]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked(_OfPartition):
    """It is stored that messages are not done: they are delayed, wait, or are tried again. Each with its `Parking`."""

    messages: Sequence[tuple[Message, Parking]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead(_OfPartition):
    """It is stored that messages are dead letters, which wait for a person. Each with its `Parking`, which says why."""

    messages: Sequence[tuple[Message, Parking]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time in which a destination accepts nothing, or nothing of one topic; `seconds`: how long it lasts already.

    `topic`: None for all topics. `error`: why, in the words of the destination.
    """

    topic: str | None
    error: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationAway(_Worked):
    """The destination does not accept messages. Told again and again while that lasts.

    `outages`: what the last tries have shown. `pauses`: the worker waits, because nothing that it has is accepted.
    """

    destination: str
    outages: Sequence[Outage]
    pauses: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationBack(_Worked):
    """The destination accepts messages again, or those of one topic. `outage`: what is over.

    `waited`: how many messages have waited for it; `or_more`: they were counted up to this number.
    """

    destination: str
    outage: Outage
    waited: int
    or_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepRefused(_Worked):
    """The database does not allow to delete what is not needed any more; the worker goes on. `what`: in words."""

    what: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseAway:
    """A worker has lost its connection to the database, or cannot connect. Told again with each try that fails.

    `error`: why, in one line. `seconds`: how long this lasts already.
    """

    database: Origin
    error: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseBack:
    """A worker works with the database again. `seconds`: how long it was away."""

    database: Origin
    seconds: float


Event = (
    Written
    | Committed
    | RolledBack
    | LeaseTaken
    | LeaseLost
    | BatchRead
    | HandedOver
    | Settled
    | Parked
    | Dead
    | DestinationAway
    | DestinationBack
    | UpkeepRefused
    | DatabaseAway
    | DatabaseBack
)
Listener = Callable[[Event], object]
L = TypeVar("L", bound=Listener)


class Listeners:
    """Functions that are told of events. An event is made only while there is one: `if listeners: listeners.tell(…)`.

    `beyond`: others that are told as well.
    """

    __slots__ = ("_beyond", "_failed", "_functions")

    def __init__(self, beyond: Listeners | None = None) -> None:
        # Replaced as a whole: several threads may tell while another one listens.
        self._functions: tuple[Listener, ...] = ()
        self._beyond = beyond
        self._failed: set[Listener] = set()

    def __bool__(self) -> bool:
        return bool(self._functions) or (self._beyond is not None and bool(self._beyond))

    def listen(self, function: L) -> L:
        """Call a function with every event from now on, and return it; `listen` also serves as a decorator.

        Raises:
            TypeError: the function is a coroutine function, which nobody would await.
        """
        if inspect.iscoroutinefunction(function):
            raise TypeError("a listener is called on the thread where something happens, so it cannot be async")
        self._functions = (*self._functions, function)
        return function

    def unlisten(self, function: Listener) -> None:
        """Call a function no more; nothing happens if it does not listen."""
        self._functions = tuple(each for each in self._functions if each != function)
        self._failed.discard(function)

    def tell(self, event: Event) -> None:
        """Call every function with an event. A function that raises disturbs nobody; its first error is logged."""
        for function in self._functions:
            try:
                function(event)
            except KeyboardInterrupt:
                raise
            except BaseException:
                # Also a CancelledError or SystemExit of the function, which would end the thread that tells.
                if function not in self._failed:
                    self._failed.add(function)
                    logger.exception("a listener to events failed; its further errors are not logged: %r", function)
        if self._beyond is not None:
            self._beyond.tell(event)


#: Listens to every outbox of this process, also to those that are made later.
EVERYWHERE = Listeners()
