"""Connections of our own, apart from the application's pool, which a second one for each thread could drain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, LifoQueue

from outbox.errors import DatabaseError
from outbox.runtime.fork import in_child
from outbox.store.dialects.dialect import Channel
from outbox.store.dialects.statements import Execute, Row, Statement

_WAIT_SECONDS = 30.0


class Connections:
    """A few connections, opened when they are needed; who finds none waits for one."""

    def __init__(self, open_channel: Callable[[], Channel], most: int) -> None:
        self._open = open_channel
        self._most = most
        self._reset()
        in_child(self._reset)

    @contextmanager
    def one(self) -> Iterator[Channel]:
        """A connection that is nobody else's meanwhile; one that failed is closed."""
        free = self._free
        try:
            channel = free.get(timeout=_WAIT_SECONDS)
        except Empty:
            raise DatabaseError(
                f"none of the producer's {self._most} connections was free within {_WAIT_SECONDS:g} s; give it more:"
                " half_pool=…"
            ) from None
        try:
            channel = channel or self._open()
            yield channel
        except BaseException:
            if channel is not None:
                channel.close()
            channel = None
            raise
        finally:
            free.put(channel)

    def close(self) -> None:
        """Close those that nobody uses."""
        for _ in range(self._most):
            try:
                channel = self._free.get_nowait()
            except Empty:
                return
            if channel is not None:
                channel.close()
            self._free.put(None)

    def _reset(self) -> None:
        """At first, and in a fork, which must not use the parent's."""
        self._free: LifoQueue[Channel | None] = LifoQueue()
        for _ in range(self._most):
            self._free.put(None)


def on_channel(channel: Channel) -> Execute:
    """How statements are executed on a connection of our own."""

    def execute(statement: Statement) -> list[Row]:
        assert not isinstance(statement.parameters, list)
        if statement.returns:
            return channel.rows(statement.sql, statement.parameters)
        channel.run(statement.sql, statement.parameters)
        return []

    return execute
