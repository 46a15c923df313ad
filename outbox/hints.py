"""Wake-ups after a commit: an event in this process, a NOTIFY for the others. Hints, never deliveries."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from outbox.store.database import Database
from outbox.store.dialect import Channel
from outbox.store.writing import Place

logger = logging.getLogger("outbox")

#: NOTIFYs of one process come no faster than this; what falls between is one hint.
_COALESCE_SECONDS = 0.01
#: When an expected commit has surely come.
_SURELY_COMMITTED_SECONDS = 0.02
_RECONNECT_SECONDS = 5.0
_LONGEST_WAIT_SECONDS = 30.0


class Hints:
    """Tells workers that something was committed. Never blocks and never raises: it is called in commit hooks."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()
        self._thread: threading.Thread | None
        self._expected: dict[int, float]
        self._begin_anew()

    def listen(self, wake: Callable[[], None]) -> _Listener:
        """Call `wake` at every hint in this process, for as long as the returned object lives."""
        listener = _Listener(wake)
        self._listeners.add(listener)
        return listener

    def hint(self) -> None:
        """Something was committed."""
        self.committed(0)

    def committed(self, transaction: int) -> None:
        """An expected commit has come true."""
        self._expected.pop(transaction, None)
        if self._listeners:
            self._wake_listeners()
        with suppress(Exception):
            self._awake()
            self._hinted = True
            # Whoever clears it looks for hints after that.
            if not self._event.is_set():
                self._event.set()

    def expect(self, transaction: int, places: Sequence[Place] = ()) -> None:
        """Something is about to be committed, and nobody may tell when it was: hint in a moment, unless told before."""
        with suppress(Exception):
            self._awake()
            first = not self._expected
            self._expected.setdefault(transaction, time.monotonic() + _SURELY_COMMITTED_SECONDS)
            if first:
                self._event.set()

    def close(self) -> None:
        """End the thread and its connection; a later hint begins anew."""
        if self._thread is not None and self._pid == os.getpid():
            self._closing = True
            self._event.set()
            self._thread.join(timeout=_RECONNECT_SECONDS)
            self._begin_anew()

    def _awake(self) -> None:
        if self._pid != os.getpid():
            # A fork copies locks in any state, but no threads.
            self._begin_anew()
        if self._thread is None:
            self._start()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._thread = None
        self._hinted = False
        self._expected = {}
        self._closing = False

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(
                    target=_notify_for_ever, args=(weakref.ref(self),), name="outbox-hints", daemon=True
                )
                # May fail for want of memory, or because the interpreter is about to end: then the next hint tries.
                thread.start()
                self._thread = thread

    def _wake_listeners(self) -> None:
        for listener in list(self._listeners):
            with suppress(Exception):
                listener.wake()

    def _next_wait(self) -> tuple[threading.Event, float]:
        expected = min(list(self._expected.values()), default=None)
        seconds = _LONGEST_WAIT_SECONDS if expected is None else max(0.0, expected - time.monotonic())
        return self._event, min(seconds, _LONGEST_WAIT_SECONDS)

    def _pass_on(self, channel: Channel | None) -> Channel | None:
        """Send what hints there are."""
        self._event.clear()
        overdue = [each for each, at in list(self._expected.items()) if at <= time.monotonic()]
        for each in overdue:
            self._expected.pop(each, None)
        if overdue:
            self._wake_listeners()
            self._hinted = True
        if self._hinted:
            self._hinted = False
            channel = self._notify(channel)
            time.sleep(_COALESCE_SECONDS)
        return channel

    def _notify(self, channel: Channel | None) -> Channel | None:
        """Send a NOTIFY on a connection of our own; a lost one is opened again, later."""
        if not self._database.dialect.notifies:
            return None
        try:
            channel = channel or self._database.open()
            channel.notify()
        except Exception as error:
            logger.debug("a wake-up was lost: %s", type(error).__name__)
            if channel is not None:
                with suppress(Exception):
                    channel.close()
            time.sleep(_RECONNECT_SECONDS)
            return None
        return channel


def _notify_for_ever(reference: weakref.ref[Hints]) -> None:
    """What the thread does, until the hints are closed, or forgotten: it must not keep them and their engine alive."""
    channel: Channel | None = None
    while (hints := reference()) is not None and not hints._closing:
        event, seconds = hints._next_wait()
        del hints
        event.wait(seconds)
        if (hints := reference()) is not None:
            channel = hints._pass_on(channel)
            del hints
    if channel is not None:
        with suppress(Exception):
            channel.close()


class _Listener:
    """Keeps a wake-up registered."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
