"""The client's deadline of each round trip: a connection whose server stays silent is shut down by a watch."""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from sqlalchemy import Engine, event

from outbox.runtime.fork import in_child
from outbox.runtime.named import named

logger = logging.getLogger("outbox")

#: Longer than the server lets a statement run, so that a server that works has answered before.
PATIENCE_SECONDS = 70.0
_LOOK_SECONDS = 5.0


class RoundTrips:
    """The round trips of one connection: `with round_trips:` surrounds each wait for the server."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._under_way: _RoundTrip | None = None
        #: False until the end of a transaction in which the server has no deadline, either.
        self.limited = True
        WATCH.add(self)

    def __enter__(self) -> None:
        self._under_way = _RoundTrip() if self.limited else None

    def __exit__(self, *exception: object) -> None:
        self._under_way = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside a transaction, between its round trips."""
        self._under_way = None
        try:
            yield
        finally:
            self.limited = True
            self._under_way = _RoundTrip()

    def look(self) -> None:
        """Count a look at the round trip under way; at the last one shut the connection down, which ends the wait."""
        found = self._under_way
        if found is None:
            return
        found.looks += 1
        if found.looks * _LOOK_SECONDS <= PATIENCE_SECONDS:
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as peer:
            # Asked after the copy was made: meanwhile the number may have become another socket's.
            if self._under_way is found:
                text = "the database has not answered for %g s; its connection is shut down, and a new one is opened"
                logger.warning(text, PATIENCE_SECONDS, extra=named("database_silent", seconds=PATIENCE_SECONDS))
                peer.shutdown(socket.SHUT_RDWR)


class _RoundTrip:
    """One wait for the server. `looks`: at how many looks of the watch it was under way."""

    # Looks and no clock, because a process that was suspended has waited for nobody meanwhile.
    __slots__ = ("looks",)

    def __init__(self) -> None:
        self.looks = 0


class WatchedConnection(psycopg.Connection[Any]):
    """A connection of the driver, each of whose waits is a round trip, whoever makes the statements."""

    _round_trips: RoundTrips | None = None
    _is_watched = True

    def leave_to_owner(self) -> None:
        """Count waits no more: the owner of the connection has round trips of its own."""
        self._is_watched = False

    def wait(self, *arguments: Any, **options: Any) -> Any:
        """Do as the driver, under the client's deadline."""
        if not self._is_watched:
            return super().wait(*arguments, **options)
        self._round_trips = self._round_trips or RoundTrips(self.fileno())
        with self._round_trips:
            return super().wait(*arguments, **options)


def watch(engine: Engine) -> None:
    """Have the watch look at all connections of an engine that no channel owns, too."""

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: object, _record: object, arguments: list[Any], options: dict[str, Any]) -> psycopg.Connection:
        return WatchedConnection.connect(*arguments, **options)


class Watch:
    """Looks at the round trips of all connections of this process, on a thread of its own."""

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        # No `time.sleep`, which tests of an application may replace: a watch without pauses would give up at once.
        self._pause = threading.Event()
        self._all: weakref.WeakSet[RoundTrips] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, round_trips: RoundTrips) -> None:
        """Watch a connection while its object lives."""
        with self._lock:
            self._all.add(round_trips)
            if self._thread is None:
                thread = threading.Thread(target=self._look_for_ever, name="outbox-watch", daemon=True)
                thread.start()
                self._thread = thread

    def look(self) -> None:
        """Look once at all."""
        with self._lock:
            found = list(self._all)
        for each in found:
            each.look()

    def _look_for_ever(self) -> None:
        while True:
            self._pause.wait(_LOOK_SECONDS)
            self.look()


WATCH = Watch()
in_child(WATCH._begin_anew)
