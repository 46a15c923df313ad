"""Wake-ups after a commit: an event in this process, a NOTIFY for the others. Hints, never deliveries."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from outbox.pace import Pace
from outbox.store.database import Database
from outbox.store.dialect import Channel
from outbox.store.writing import Sent

logger = logging.getLogger("outbox")

_RECONNECT_SECONDS = 5.0
_LONGEST_WAIT_SECONDS = 30.0


class Hints:
    """Tells workers that something was committed. Never blocks and never raises: it is called in commit hooks."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._listeners: weakref.WeakSet[_Listener] = weakref.WeakSet()
        self._thread: threading.Thread | None
        self._begin_anew()

    def listen(self, wake: Callable[[], None]) -> _Listener:
        """Call `wake` at every hint in this process, for as long as the returned object lives."""
        listener = _Listener(wake)
        self._listeners.add(listener)
        return listener

    def committed(self, sent: Sent, since: float) -> None:
        """A transaction was committed; nobody has to be woken for what its writer sends by itself."""
        if sent.more:
            self.hint()

    def hint(self) -> None:
        """Something was committed."""
        if self._listeners:
            self._wake_listeners()
        with suppress(Exception):
            self._awake()
            self._hints += 1
            # Whoever clears it looks for hints after that.
            if not self._event.is_set():
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
        self._hints = 0
        self._pace = Pace()
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

    def _pass_on(self, channel: Channel | None) -> Channel | None:
        """Send what hints there are."""
        self._event.clear()
        hints, self._hints = self._hints, 0
        if hints:
            channel = self._notify(channel)
            time.sleep(self._pace.after(hints))
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
        event = hints._event
        del hints
        event.wait(_LONGEST_WAIT_SECONDS)
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
