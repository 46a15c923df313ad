"""Connections of our own: with a second connection for each thread the application's pool could run dry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, LifoQueue
from typing import TypeVar

from outbox.errors import DatabaseError, OutboxError
from outbox.runtime.fork import in_child
from outbox.store.database import Channel

_WAIT_SECONDS = 30.0
#: The number of tries of RocketMQ's client when it sends.
_TRIES = 3

R = TypeVar("R")


def _answers(channel: Channel) -> None:
    channel.rows("SELECT 1")


class Connections:
    """A few connections, opened when needed; a caller that finds none free waits."""

    def __init__(
        self, open_channel: Callable[[], Channel], most: int, *, ask: Callable[[Channel], None] = _answers
    ) -> None:
        """`ask`: raises if a connection is lost; raises an `OutboxError` if the connection is of no use."""
        self._ask = ask
        self._open = open_channel
        self._most = most
        #: How often `close` was called.
        self._closed = 0
        self._reset()
        in_child(self._reset)

    @contextmanager
    def one(self) -> Iterator[Channel]:
        """Yield a connection for the caller alone; close it if the block raises."""
        free, closed = self._free, self._closed
        try:
            channel = free.get(timeout=_WAIT_SECONDS)
        except Empty:
            raise DatabaseError(
                f"none of the producer's {self._most} connections was free within {_WAIT_SECONDS:g} s; raise"
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
            if channel is not None and self._closed != closed:
                channel.close()
                channel = None
            free.put(channel)

    def call(self, do: Callable[[Channel], R]) -> R:
        """Call `do` with a connection; if the connection is lost, call again with another connection.

        So `do` may write twice, and the second time must change nothing.
        """
        for tries_left in reversed(range(_TRIES)):
            again = False
            try:
                with self.one() as channel, channel.database.explained():
                    try:
                        return do(channel)
                    except Exception as error:
                        again = self._is_lost(channel) and channel.database.transient(error)
                        raise
            except Exception:
                if not (again and tries_left):
                    raise
            # The connections that nobody uses were most likely lost as well.
            self.close()
        raise AssertionError("the last try returns or raises")

    def _is_lost(self, channel: Channel) -> bool:
        try:
            self._ask(channel)
        except OutboxError:
            raise
        except Exception:
            return True
        return False

    def close(self) -> None:
        """Close the connections that nobody uses; each of the others is closed when it is given back."""
        self._closed += 1
        for _ in range(self._most):
            try:
                channel = self._free.get_nowait()
            except Empty:
                return
            if channel is not None:
                channel.close()
            self._free.put(None)

    def _reset(self) -> None:
        """Begin without connections: at first, and in a forked process, which must not use its parent's."""
        self._free: LifoQueue[Channel | None] = LifoQueue()
        for _ in range(self._most):
            self._free.put(None)
