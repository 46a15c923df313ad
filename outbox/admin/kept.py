"""One connection for many calls of an operator's page, opened again when it is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from outbox.errors import DatabaseError
from outbox.runtime.fork import in_child
from outbox.store.database import Channel, Database

#: After so many seconds without a call the connection is asked whether it still answers.
_IDLE_SECONDS = 1.0


class KeptConnection:
    """A connection that calls take in turns. A forked process opens its own."""

    def __init__(self, database: Database, deadline: timedelta) -> None:
        """`deadline`: for so long a call waits for the calls before."""
        self.database = database
        self._deadline = deadline.total_seconds()
        self._channel: Channel | None = None
        self._reset()
        in_child(self._reset)

    @contextmanager
    def one(self) -> Iterator[Channel]:
        """Yield the connection to one caller; close it after an error, so that the next call opens another.

        Raises:
            DatabaseError: the calls before have not ended within the deadline.
        """
        lock = self._lock
        if not lock.acquire(timeout=self._deadline):
            raise DatabaseError(
                f"the connection was busy with other calls for {self._deadline:g} s; raise the deadline, or use calls"
                " with connections of their own (outbox.admin)"
            )
        try:
            with self.database.explained():
                self._channel = channel = self._living()
                try:
                    yield channel
                except Exception:
                    self._close()
                    raise
                self._used_at = time.monotonic()
        finally:
            lock.release()

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        with self._lock:
            self._close()

    def _living(self) -> Channel:
        """Return the connection if it answers, or another."""
        if self._channel is not None and time.monotonic() - self._used_at > _IDLE_SECONDS:
            with suppress(Exception):
                self._channel.rows("SELECT 1")
                return self._channel
            self._close()
        return self._channel or self.database.open()

    def _close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _reset(self) -> None:
        """Begin without a connection: at first, and in a forked process, which must not use its parent's."""
        self._lock = threading.Lock()
        self._channel = None
        self._used_at = 0.0
