"""Direct send: the writer itself sends messages that need no order, right after its commit.

Nothing depends on it. A writer leaves messages behind when it is killed, when it has too much to do, or when the
destination is away. The compensation of the subscription finds them in the log after its grace.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from contextlib import suppress
from typing import NamedTuple

from outbox.direct.delivery import DirectDelivery
from outbox.direct.dispatcher import Dispatcher
from outbox.runtime.clock import clock
from outbox.runtime.fork import in_child
from outbox.senders.opening import Destination
from outbox.store.database import Database
from outbox.store.log.append import Direct
from outbox.writing.sent import Sent

_LAST_SECONDS = 5.0


class Offer(NamedTuple):
    """The messages that a writer may send itself; and how many of one transaction, until too many are waiting."""

    direct: Direct
    room: int


class DirectSends:
    """The direct sends of one process, for commit hooks: its methods for these never block and never raise.

    After a fork the child begins anew, without the messages that the parent has to send.
    """

    #: The relay sends what comes while so many messages are waiting.
    most_waiting = 10_000

    def __init__(self, database: Database, destination: Destination, name: str) -> None:
        self._database = database
        self._destination = destination
        self._name = name
        self._abandoned = False
        self._dispatcher: Dispatcher | None
        self._reset()
        _all.add(self)

    def offer(self) -> Offer | None:
        """Return what this writer may send itself of a transaction.

        None if the relay must: before the compensation is known to exist, and while the destination is away.
        """
        with suppress(Exception):
            dispatcher = None if self._abandoned else self._running()
            if dispatcher is not None and dispatcher.ready and dispatcher.known is not None:
                return Offer(dispatcher.known, self.most_waiting - dispatcher.waiting)
        return None

    def committed(self, sent: Sent, since: float) -> None:
        """Queue messages that were committed and that this writer is to send."""
        if sent.direct:
            with suppress(Exception):
                dispatcher = self._running()
                if dispatcher is not None and dispatcher.waiting <= self.most_waiting:
                    dispatcher.committed(sent.direct, since=since)

    def end(self) -> None:
        """Send what is waiting, and nothing after that. It takes no lock, so it may be called from anywhere."""
        self._abandoned = True
        dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.end()

    def close(self, timeout: float = _LAST_SECONDS) -> None:
        """Send what is waiting, and nothing after that; wait for it, for at most `timeout` seconds."""
        self._abandoned = True
        self.drain(timeout)

    def drain(self, timeout: float) -> None:
        """Send what is waiting, for at most `timeout` seconds, and end the thread; a later commit begins anew."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.end()
            dispatcher.join(timeout)

    def _running(self) -> Dispatcher | None:
        dispatcher = self._dispatcher
        if dispatcher is not None and dispatcher.running:
            return dispatcher
        if self._abandoned:
            return None
        with self._lock:
            if self._dispatcher is None or not self._dispatcher.running:
                _drain_at_exit()
                dispatcher = Dispatcher(DirectDelivery(self._database, self._destination, self._name))
                # May fail for want of memory, or because the interpreter is about to end: then the next call tries.
                dispatcher.start()
                _under_way.add(dispatcher)
                self._dispatcher = dispatcher
            return self._dispatcher

    def _reset(self) -> None:
        """Begin without a thread; also in a fork, which copies locks in any state, but no threads."""
        # An RLock, because a signal handler may commit, too, while the thread that it interrupts holds the lock.
        self._lock = threading.RLock()
        self._dispatcher = None


_all: weakref.WeakSet[DirectSends] = weakref.WeakSet()
#: Also dispatchers of `DirectSends` that are gone: a thread holds its dispatcher until it ends.
_under_way: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
_left_behind: list[object] = []
_drains_at_exit = False
#: The moment until which a process that ends waits for direct sends.
_drained_until: float | None = None


def _drain() -> None:
    global _drained_until
    deadline = _drained_until = _drained_until or clock() + _LAST_SECONDS
    for each in list(_all):
        with suppress(Exception):
            each.drain(max(0.0, deadline - clock()))
    for dispatcher in list(_under_way):
        with suppress(Exception):
            dispatcher.end()
            dispatcher.join(max(0.0, deadline - clock()))


def _drain_at_exit() -> None:
    """Have `_drain` called at exit while threads may still be started, because a sender may need some to connect."""
    global _drains_at_exit
    if not _drains_at_exit:
        _drains_at_exit = True
        import concurrent.futures.thread  # noqa: F401 - what is registered after it is called before it

        with suppress(AttributeError, RuntimeError):
            threading._register_atexit(_drain)  # type: ignore[attr-defined]  # there is no public name for this moment
        # Called a second time for messages that the last threads have committed.
        atexit.register(_drain)


def _after_fork_in_child() -> None:
    global _drained_until
    _drained_until = None
    # The parent's connections must not be torn down here.
    _left_behind.extend(_under_way)
    _under_way.clear()
    for each in list(_all):
        each._reset()


in_child(_after_fork_in_child)
