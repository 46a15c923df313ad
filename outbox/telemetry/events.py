"""Events: values for what happened, told to listeners on the thread where it happened."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from outbox.model.message import Message
from outbox.model.parking import Parking, States
from outbox.model.verdict import Verdict
from outbox.store.database import Database

logger = logging.getLogger("outbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. `database`: of the outbox."""

    database: Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Event):
    """Messages were written to the log, in a transaction that is still open.

    `connection`: of the transaction, SQLAlchemy's or psycopg's own. A repetition of a dedup key is not written. Half
    messages, and messages restored from them, have no such events.
    """

    connection: object
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """A transaction in which messages were written has committed.

    `messages`: those that were `Written`, without rollbacks to a savepoint. `seconds`: of the COMMIT. The transactions
    of a psycopg connection of the application's own are not noticed.
    """

    messages: Sequence[Message]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(Event):
    """Messages that were `Written` are gone: with their transaction, with a savepoint, or because the COMMIT failed.

    A COMMIT also fails when the connection is lost. Then the database may have committed nevertheless.
    """

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked(Event):
    """The fields of all events of one subscription."""

    subscription: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfPartition(Worked):
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken(_OfPartition):
    """This worker owns a partition from now on. `epoch`: the number of the lease, greater than any number before."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost(_OfPartition):
    """This worker owns a partition no longer. `error`: why; None if the worker has given the lease back."""

    epoch: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRead(_OfPartition):
    """A batch of messages was read from the log. `now`: the database's clock."""

    messages: Sequence[Message]
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver(Worked):
    """A call of the handler has come back, in time or late. Told on the thread of the call.

    `destination`: of the messages; None for the functions of a consumer, and for a check-back. `verdicts`: in the order
    of the messages; None if the handler raised. `error`: of the handler, in words. `seconds`: of the call. Until a
    message is `Settled`, another call may have the message again.
    """

    destination: str | None
    messages: Sequence[Message]
    verdicts: Sequence[Verdict] | None
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(_OfPartition):
    """Messages are stored as done: no worker handles them again. `seconds`: of the settle."""

    messages: Sequence[Message]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked(_OfPartition):
    """Messages are stored as not done: delayed, waiting, or tried again. Each with its `Parking`."""

    messages: Sequence[tuple[Message, Parking]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead(_OfPartition):
    """Messages are stored as dead letters, which wait for a person. Each with its `Parking`."""

    messages: Sequence[tuple[Message, Parking]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time in which a destination accepts nothing, or nothing of a topic; `seconds`: so far.

    `topic`: None for all topics. `error`: why, in the words of the destination.
    """

    topic: str | None
    error: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationAway(Worked):
    """The destination does not accept messages. Told again and again meanwhile.

    `outages`: as the last tries have shown. `pauses`: the worker waits, because none of its messages is accepted.
    """

    destination: str
    outages: Sequence[Outage]
    pauses: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationBack(Worked):
    """The destination accepts messages again, or messages of one topic. `outage`: now over."""

    destination: str
    outage: Outage


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepRefused(_OfPartition):
    """The database does not allow to delete rows that are no longer needed; the worker goes on. `what`: in words."""

    what: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseAway(Event):
    """A worker has lost its connection to the database, or cannot connect. Told again with each failing try.

    `error`: why, in one line. `seconds`: so far.
    """

    error: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseBack(Event):
    """A worker works with the database again. `seconds`: of the outage."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat(Event):
    """A worker has reached the database, and has done what was due. The next beat is due within `seconds`.

    Told on the thread of the worker, at most once a second. A worker that stands by beats as well. Calls of a handler
    delay no beat.
    """

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated(Event):
    """An inbox was asked about a message that `consumer` has handled before."""

    consumer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Called(Event):
    """A call of one of RocketMQ's clients has ended at a front; told in the front's event loop.

    `rpc`: the name of the call. `code`: the name of the answer's code; empty if no answer was given. `messages`: handed
    out by the call. `seconds`: until the end, of a stream as well.
    """

    rpc: str
    code: str
    messages: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Questioned(Event):
    """A front had a question about an open transaction of a topic. `asked`: whether a producer was there to take it."""

    topic: str
    asked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended(Event):
    """A front serves RocketMQ's clients; told every 5 seconds, and with None for both numbers at the end.

    `clients`: known to the front. `streams`: of clients, open now. `renewals`: of messages in the hands of push
    consumers, since the last time.
    """

    clients: int | None
    streams: int | None
    renewals: int


Listener = Callable[[Event], object]
L = TypeVar("L", bound=Listener)


class Listeners:
    """Functions that are told of events. Without a function no event is made: `if listeners: listeners.tell(…)`.

    `beyond`: more listeners, told as well.
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
        """Call a function with every event from now on, and return the function; `listen` also serves as a decorator.

        Raises:
            TypeError: the function is a coroutine function, which nobody would await.
        """
        if inspect.iscoroutinefunction(function):
            raise TypeError("a listener is called on the thread where something happens, so it cannot be async")
        self._functions = (*self._functions, function)
        return function

    def unlisten(self, function: Listener) -> None:
        """Call a function no more; a function that does not listen is ignored."""
        self._functions = tuple(each for each in self._functions if each != function)
        self._failed.discard(function)

    def tell(self, event: Event) -> None:
        """Call every function with an event. An error of a function disturbs no other; the first is logged."""
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


@dataclass(frozen=True, slots=True)
class Teller:
    """Tells of one subscription, or of one partition; `where`: the fields of all its events."""

    listeners: Listeners
    where: Mapping[str, Any]

    def of_partition(self, partition: int) -> Teller:
        """Return a teller for one partition."""
        return Teller(self.listeners, {**self.where, "partition": partition})

    def tell(self, event: Callable[..., Event], **fields: Any) -> None:
        """Make an event with these fields, and tell the listeners, if there are any."""
        if self.listeners:
            self.listeners.tell(event(**self.where, **fields))

    def tell_settled(
        self, done: Sequence[Message], parkings: Sequence[tuple[Message, Parking]], seconds: float
    ) -> None:
        """Tell which messages were stored as done, parked and dead. `seconds`: of the settle."""
        if done:
            self.tell(Settled, messages=done, seconds=seconds)
        if parkings and self.listeners:
            dead = [each for each in parkings if each[1].state == States.DEAD]
            parked = [each for each in parkings if each[1].state != States.DEAD] if dead else parkings
            if parked:
                self.tell(Parked, messages=parked)
            if dead:
                self.tell(Dead, messages=dead)
