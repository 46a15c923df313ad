"""Events: values for what happened, told to whoever listens, on the thread where it happened."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sqlalchemy import Engine

from outbox.model.message import Message

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


Event = Written | Committed | RolledBack
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
            except Exception:
                if function not in self._failed:
                    self._failed.add(function)
                    logger.exception("a listener to events failed; its further errors are not logged: %r", function)
        if self._beyond is not None:
            self._beyond.tell(event)


#: Listens to every outbox of this process, also to those that are made later.
EVERYWHERE = Listeners()
