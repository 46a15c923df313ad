"""Transactions that the outbox opens: the context managers, the decorator, and the joining of a running transaction."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_args, overload

from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from outbox.errors import DatabaseError, NoTransactionError
from outbox.writing.engines import scopes_on
from outbox.writing.handles import is_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from outbox.writing.engines import Bind

#: How a new scope meets a running transaction. required: join, or open a transaction if none runs. requires_new: open a
#: transaction in any case. mandatory: join, and raise if none runs.
Propagation = Literal["required", "requires_new", "mandatory"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)


class Transactional(Protocol[S_contra, P, R_co]):
    """A function in a transaction: called without a session, it gets a new session."""

    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, session: S_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class Decorator(Protocol):
    """The decorator `transactional` with options given."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, R]], /
    ) -> Transactional[AsyncSession, P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Session, P], R], /) -> Transactional[Session, P, R]: ...


@dataclass(slots=True)
class _Running:
    session: Any
    thread: int
    task: asyncio.Task[Any] | None
    over: bool = False


class Scopes:
    """Opens sessions on a bind, and knows the session whose transaction runs in the thread and task.

    New tasks and threads copy a context variable, and no transaction. There the caller has to say how to go on: else
    the way of calling would decide about atomicity. `asyncio.wait_for` makes a task on Python 3.11 only.
    """

    def __init__(self, bind: Bind, *, one_writer: bool) -> None:
        self._one_writer = one_writer
        self._awaits = not isinstance(bind, Engine | sessionmaker)
        self._open = scopes_on(bind)
        self._running: ContextVar[_Running | None] = ContextVar("outbox_running", default=None)

    def begin(self, propagation: Propagation = "required") -> AbstractContextManager[Session]:
        """Open a session in a transaction that commits at the end, or join the running transaction."""
        self._require(awaits=False, instead="async with outbox.abegin()")
        return self._begun(propagation)

    @contextmanager
    def _begun(self, propagation: Propagation) -> Iterator[Session]:
        running = self._to_join(propagation)
        if running is not None:
            yield running
            return
        with self._open() as session, self._entered(session):
            yield session

    def abegin(self, propagation: Propagation = "required") -> AbstractAsyncContextManager[AsyncSession]:
        """Do the same as `begin`, with an AsyncSession."""
        self._require(awaits=True, instead="with outbox.begin()")
        return self._abegun(propagation)

    @asynccontextmanager
    async def _abegun(self, propagation: Propagation) -> AsyncIterator[AsyncSession]:
        running = self._to_join(propagation)
        if running is not None:
            yield running
            return
        async with self._open() as session:
            with self._entered(session):
                yield session

    def wrap(self, function: Callable[..., Any], propagation: Propagation) -> Callable[..., Any]:
        """Wrap `function` in a transaction, with a session as first argument."""
        require_plain_function(function, "a transactional function", "outbox.begin()")
        _require_known(propagation)
        if inspect.iscoroutinefunction(function):
            self._require(awaits=True, instead="a function without async")

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                if args and is_session(args[0]):
                    with self._entered(args[0]):
                        return await function(*args, **kwargs)
                async with self.abegin(propagation) as session:
                    return await function(session, *args, **kwargs)

            return awaited
        self._require(awaits=False, instead="async def")

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if args and is_session(args[0]):
                with self._entered(args[0]):
                    return function(*args, **kwargs)
            with self.begin(propagation) as session:
                return function(session, *args, **kwargs)

        return called

    def _to_join(self, propagation: Propagation) -> Any | None:
        """Return the session to join; None: open a transaction."""
        _require_known(propagation)
        running = self._running.get()
        if running is not None and running.over:
            running = None
        if running is not None and not _is_here(running):
            if propagation == "requires_new":
                return None
            or_new = "" if self._one_writer else ", or propagation='requires_new'"
            raise NoTransactionError(
                "the transaction that is open here runs in another task or thread, as under asyncio.wait_for, gather or"
                f" to_thread: pass the session{or_new}"
            )
        session = None if running is None else running.session
        if propagation == "mandatory" and session is None:
            raise NoTransactionError(
                "no transaction of this outbox is running here, and none is opened (propagation='mandatory'); call the"
                " function inside of outbox.begin() or of a transactional function, or pass a session"
            )
        if propagation == "requires_new":
            if session is not None and self._one_writer:
                raise DatabaseError(
                    "SQLite has one writer at a time: with propagation='requires_new' the new transaction would wait"
                    " for the running one, and that for the new one; use 'required', or a savepoint"
                )
            return None
        return session

    @contextmanager
    def _entered(self, session: Any) -> Iterator[None]:
        running = _Running(session, threading.get_ident(), _task())
        token = self._running.set(running)
        try:
            yield
        finally:
            # A copy of the context may live on, and must not find the transaction running.
            running.over = True
            # Some frameworks begin and end a dependency in two contexts: then nothing is restored.
            with suppress(ValueError):
                self._running.reset(token)

    def _require(self, *, awaits: bool, instead: str) -> None:
        if awaits != self._awaits:
            kind = "an AsyncEngine" if self._awaits else "an Engine that blocks"
            raise DatabaseError(f"this outbox is made on {kind}; use {instead}, or a second Outbox on the other kind")


def _require_known(propagation: str) -> None:
    if propagation not in get_args(Propagation):
        raise ValueError(f"propagation {propagation!r:.40} is none of {', '.join(get_args(Propagation))}")


def require_plain_function(function: Callable[..., Any], what: str, instead: str) -> None:
    """Refuse a function that cannot get a session, or that would run only after its transaction.

    The error begins with `what`, and says what to use `instead`.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{what} cannot be a generator: its transaction would be over before its first value is asked for; use"
            f" {instead} inside of it"
        )
    first = next(iter(inspect.signature(function).parameters), None)
    if first in ("self", "cls"):
        raise TypeError(
            f"the session comes as the first argument, which a method has for itself; use {instead} in methods"
        )
    if first is None:
        raise TypeError(f"{what} gets its session as its first argument; {function!r} takes none")


def _is_here(running: _Running) -> bool:
    return running.thread == threading.get_ident() and running.task is _task()


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
