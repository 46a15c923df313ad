"""Wake-ups after a commit: an event in this process, a NOTIFY for other processes. Hints carry no messages."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue

from outbox.runtime.fork import in_child
from outbox.runtime.linger import Linger
from outbox.runtime.stop import Stop
from outbox.store.database import Channel, Database
from outbox.writing.sent import Sent

logger = logging.getLogger("outbox")

_LONGEST_WAIT_SECONDS = 30.0
#: The pause between two hints while commits are many. Each hint tells the pause; workers poll meanwhile.
_BUSY_PAUSE_SECONDS = 0.05


class Notifier:
    """Tells workers of commits. Never blocks and never raises, because commit hooks call `hint`."""

    #: After an error of a new connection, the next connection is opened so many seconds later.
    reconnect_seconds = 5.0

    def __init__(self, database: Database) -> None:
        self._database = database
        self._listeners: weakref.WeakSet[partial[None]] = weakref.WeakSet()
        self._thread: threading.Thread | None
        self._reset()
        in_child(self._reset)

    def listen(self, wake: Callable[[], None]) -> partial[None]:
        """Call `wake` at every hint in this process, while the returned object lives."""
        listener = partial(wake)
        self._listeners.add(listener)
        return listener

    def committed(self, sent: Sent) -> None:
        """Hint at a commit that wrote something for workers."""
        if sent.needs_hint:
            self.hint()

    def hint(self) -> None:
        """Wake the listeners of this process, and let the thread notify other processes."""
        for listener in list(self._listeners) if self._listeners else ():
            with suppress(Exception):
                listener()
        try:
            if self._thread is None:
                self._start()
            self._rung.put(None)
        except Exception:  # noqa: S110 - the next hint tries again; `suppress` is three calls more for each commit
            pass

    def close(self) -> None:
        """End the thread and its connection; a later hint starts a new thread."""
        thread = self._thread
        if thread is not None:
            self._stop.ask()
            self._reset()
            thread.join(timeout=self.reconnect_seconds)

    def _reset(self) -> None:
        """Begin without a thread, at first and in a forked child: a fork copies locks in any state, and no threads."""
        #: One item for each hint. Putting takes no lock, so commit hooks and signal handlers may do so at any point.
        self._rung: SimpleQueue[None] = SimpleQueue()
        # Reentrant, because signal handlers commit, too, and may interrupt the thread that has the lock.
        self._lock = threading.RLock()
        self._starting = False
        self._thread = None

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._starting:
                return
            self._starting = True
            try:
                stop = Stop(wake=partial(self._rung.put, None))
                thread = threading.Thread(
                    target=_notify_for_ever,
                    args=(weakref.ref(self), self._rung, stop),
                    name="outbox-hints",
                    daemon=True,
                )
                # May fail for lack of memory, or at the end of the interpreter: then the next hint tries.
                thread.start()
                self._thread, self._stop = thread, stop
            finally:
                self._starting = False

    def _open_channel(self) -> Channel | None:
        """Open a channel, if the database can notify other processes."""
        return self._database.open_plainly() if self._database.dialect.driving.notifies else None


def _notify_for_ever(reference: weakref.ref[Notifier], rung: SimpleQueue[None], stop: Stop) -> None:
    """Run the thread until the notifier is closed or garbage-collected; keep neither the notifier nor its engine."""
    channel: Channel | None = None
    linger = Linger(_BUSY_PAUSE_SECONDS, 0)
    while not stop.asked and reference() is not None:
        times = _heard(rung)
        notifier = reference() if times and not stop.asked else None
        if notifier is None:
            continue
        was_open, pause = channel is not None, linger.after(times)
        try:
            channel = channel or notifier._open_channel()
            if channel is not None:
                channel.notify(pause)
        except Exception as error:
            logger.debug("a wake-up was lost: %s", type(error).__name__)
            if channel is not None:
                channel.close()
            channel = None
            if was_open:
                # The server may have ended a connection that was idle. The hint goes out on a new one, at once.
                rung.put(None)
            else:
                pause = notifier.reconnect_seconds
        del notifier
        stop.rest(pause)
    if channel is not None:
        channel.close()


def _heard(rung: SimpleQueue[None]) -> int:
    """Wait for a hint, but not for ever; return the number of hints."""
    times = 0
    with suppress(Empty):
        rung.get(timeout=_LONGEST_WAIT_SECONDS)
        for times in count(1):  # noqa: B007 - counts until the queue is empty
            rung.get_nowait()
    return times
