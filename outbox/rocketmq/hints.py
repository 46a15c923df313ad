"""Hints at commits of every process, for calls that wait: one connection and one thread for any number of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outbox.runtime.fork import in_child
from outbox.runtime.wakeup import Wake
from outbox.store.database import Channel
from outbox.store.failure import in_one_line
from outbox.writing.bare import BareOutbox

logger = logging.getLogger("outbox")

#: The thread ends after so many seconds in which no call waits, and opens a connection that often after an error.
_IDLE_SECONDS, _RECONNECT_SECONDS = 30.0, 5.0


class Hints:
    """Wakes calls at commits of this process, and of others where the database tells of them.

    A hint that is lost costs a poll interval, and no message.
    """

    def __init__(self, outbox: BareOutbox, open_channel: Callable[[], Channel]) -> None:
        self._outbox = outbox
        self._open = open_channel
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._wakes: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._stop = Wake()
        self._stopped = False

    @contextmanager
    def wake(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` at every hint until the block ends, from any thread."""
        here = self._outbox.notifier.listen(wake)
        with self._lock:
            if self._thread is None and self._outbox.database.dialect.driving.notifies and not self._stopped:
                thread = threading.Thread(target=self._hear, name="outbox-hearing", daemon=True)
                thread.start()
                self._thread = thread
            self._wakes.append(wake)
        try:
            yield
        finally:
            del here
            with self._lock:
                self._wakes.remove(wake)

    def close(self, seconds: float = _RECONNECT_SECONDS) -> None:
        """End the thread and its connection; wait for at most so many seconds."""
        with self._lock:
            self._stopped, thread = True, self._thread
        self._stop.set()
        if thread is not None:
            thread.join(seconds)

    def _hear(self) -> None:
        """Listen until no call has waited for a while."""
        while not self._ends():
            try:
                channel = self._open()
            except Exception as error:
                self._failed(error)
                continue
            try:
                self._listen(channel)
            except Exception as error:
                self._failed(error)
            finally:
                channel.close()

    def _listen(self, channel: Channel) -> None:
        channel.listen()
        while not self._stopped:
            if not self._stop.wait(_IDLE_SECONDS, channel.fileno) and not self._wakes:
                return
            if channel.hinted() is not None:
                for wake in [*self._wakes]:
                    wake()

    def _failed(self, error: Exception) -> None:
        logger.debug("hints of other processes are not heard: %s", in_one_line(error)[0])
        self._stop.wait(_RECONNECT_SECONDS)

    def _ends(self) -> bool:
        with self._lock:
            ends = self._stopped or not self._wakes
            if ends:
                self._thread = None
            return ends
