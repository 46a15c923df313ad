"""What every group of questions and orders of `outbox.admin` has: a connection for each call, and awaited forms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from outbox.admin.kept import KeptConnection
from outbox.model.command import Commands
from outbox.model.limits import require_wait
from outbox.store.database import Channel, Database
from outbox.store.failure import in_one_line

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def awaited(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return the awaited form of a blocking method; the method runs in a thread."""

    @wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, self, *args, **kwargs)

    call.__doc__ = f"Do as `{method.__name__}`, awaited."
    return call


class Face:
    """Opens a connection for each call, and closes the connection at the end."""

    def __init__(self, where: Database | Channel | KeptConnection) -> None:
        if not isinstance(where, Database | Channel | KeptConnection):
            raise TypeError(f"where must be the database of an outbox, not {type(where).__name__}; use Outbox(…).admin")
        self._where = where

    @contextmanager
    def connected(self, *, deadline: timedelta = timedelta(seconds=10)) -> Iterator[Self]:
        """Yield an object like this one, whose calls share one connection, for a page that asks often.

        Calls of several threads or tasks take turns. A lost connection is opened again by the next call.

        Args:
            deadline: for so long a call waits for the calls before.

        Raises:
            ValueError: the deadline is no timedelta, or below 0.
        """
        require_wait("deadline", deadline)
        if not isinstance(self._where, Database):
            yield self
            return
        with closing(KeptConnection(self._where, deadline)) as kept:
            yield type(self)(kept)

    @property
    def commands(self) -> Commands:
        """Writes commands about this outbox, for texts that advise one."""
        return self._database.commands

    def explain(self, error: Exception) -> tuple[str, bool]:
        """Return an error of a call in one line, without parameters of statements, and whether the line says enough."""
        return in_one_line(error, self.commands)

    @property
    def _database(self) -> Database:
        return self._where if isinstance(self._where, Database) else self._where.database

    @contextmanager
    def _channel(self) -> Iterator[Channel]:
        if isinstance(self._where, Channel):
            yield self._where
            return
        if isinstance(self._where, KeptConnection):
            with self._where.one() as channel:
                yield channel
            return
        with self._where.explained(), closing(self._where.open()) as channel:
            yield channel
