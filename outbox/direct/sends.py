"""Direct send: a writer sends messages that need no order, right after the commit.

No promise depends on direct sends. A writer leaves messages behind when killed, when too busy, or when the destination
is away. The compensation of the subscription finds them in the log after the grace.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

from outbox.direct.delivery import MOST_AT_ONCE, DirectDelivery
from outbox.model.message import LogRef
from outbox.runtime.clock import clock
from outbox.runtime.fork import in_child
from outbox.runtime.linger import Linger
from outbox.senders.opening import Destination
from outbox.store.database import Database
from outbox.store.log.append import Direct
from outbox.telemetry.events import EVERYWHERE, Listeners
from outbox.writing.sent import Sent

_LAST_SECONDS = 5.0
#: For so long nothing is sent directly after the destination was away; or when a round takes longer than this.
_PAUSE_SECONDS = 1.0
_LONGEST_WAIT = 30.0


class _Committed(NamedTuple):
    """The messages of one transaction; sending has to begin before the moment `until`."""

    refs: Sequence[LogRef]
    until: float


class Dispatcher:
    """A queue, and a daemon thread that empties the queue, until asked to end.

    Commit hooks, signal handlers and finalizers only put into the queue, whose `put` may be called while another `put`
    is under way. Only the thread uses the rest.
    """

    def __init__(self, delivery: DirectDelivery) -> None:
        self._delivery = delivery
        self._news: SimpleQueue[_Committed | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox-direct", daemon=True)
        self._ending = False
        self._counting = threading.RLock()
        #: How many messages wait to be sent.
        self.waiting = 0
        #: The messages that may be sent directly; None until the compensation is known to exist.
        self.known: Direct | None = None
        # Used by the thread only
        self._due: deque[_Committed] = deque()
        self._linger = Linger()
        self._away_until = 0.0
        self._busy_since: float | None = None

    @property
    def running(self) -> bool:
        """True while the thread works; it may have ended for want of memory."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """True when a message that is committed now is likely to be sent at once."""
        now, busy_since = clock(), self._busy_since
        busy = busy_since is not None and now - busy_since >= _PAUSE_SECONDS
        return now >= self._away_until and not busy and not self._delivery.hangs

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def committed(self, refs: Sequence[LogRef], *, since: float) -> None:
        """Send messages whose commit began at the moment `since`, while the time for direct sends lasts."""
        self._count(len(refs))
        self._news.put(_Committed(refs=refs, until=since + self._delivery.right))

    def end(self) -> None:
        """End the thread when nothing waits any more."""
        self._ending = True
        self._news.put(None)

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, for at most `timeout` seconds."""
        self._thread.join(timeout)

    def _count(self, difference: int) -> None:
        with self._counting:
            self.waiting += difference

    # What the thread does

    def _run(self) -> None:
        try:
            while not (self._ending and self._idle):
                self._round()
        finally:
            self._delivery.close()

    @property
    def _idle(self) -> bool:
        return self._news.empty() and not self._due and not self._delivery.hangs

    @property
    def _may_send(self) -> bool:
        """True when messages can be read, and no call of the sender hangs."""
        return self._delivery.usable and not self._delivery.hangs

    def _round(self) -> None:
        self._listen(self._seconds_to_wait())
        self._busy_since = clock()
        try:
            self._delivery.acknowledge_late()
            if self._delivery.refresh_in <= 0:
                self.known = self._delivery.refresh()
            batch = self._take()
            if batch:
                self._deliver(batch)
        except Exception as error:
            # While this is None, writers leave all messages to the relay.
            self.known = None
            self._delivery.reset(error)
        finally:
            self._busy_since = None

    def _listen(self, seconds: float) -> None:
        with suppress(Empty):
            news = self._news.get(timeout=seconds)
            while True:
                if news is not None:
                    self._due.append(news)
                news = self._news.get_nowait()

    def _seconds_to_wait(self) -> float:
        refresh_in = min(self._delivery.refresh_in, _LONGEST_WAIT)
        if not self._may_send:
            # Messages that wait are dropped when their time is over; the compensation sends them.
            return refresh_in if self._idle else min(refresh_in, _PAUSE_SECONDS)
        return 0.0 if self._due else refresh_in

    def _take(self) -> list[_Committed]:
        """Take the next messages, about as many as are read at once; leave late ones to the compensation."""
        now = clock()
        batch: list[_Committed] = []
        room = MOST_AT_ONCE if self._may_send else 0
        while self._due and (room > 0 or self._due[0].until <= now):
            committed = self._due.popleft()
            self._count(-len(committed.refs))
            if now < committed.until:
                batch.append(committed)
                room -= len(committed.refs)
        return batch

    def _deliver(self, batch: list[_Committed]) -> None:
        # What comes while a call is under way is no reason to go on without a pause: it would be sent in small calls.
        full = bool(self._due)
        claims = {ref: committed.until for committed in batch for ref in committed.refs}
        try:
            for call in self._delivery.deliver(claims, partial(self._news.put, None)):
                self._listen(max(0.0, self._delivery.look(call) - time.monotonic()))
        except Exception:
            for committed in batch:
                if refs := [ref for ref in committed.refs if ref in claims]:
                    self._due.append(committed._replace(refs=refs))
                    self._count(len(refs))
            raise
        # The claims that are left now were rolled back to a savepoint.
        if self._delivery.away:
            self._away_until = clock() + _PAUSE_SECONDS
        if not full:
            time.sleep(self._linger.after(len(batch)))


class DirectSends:
    """The direct sends of a process. Methods for commit hooks never block and never raise.

    After a fork the child begins anew, without the parent's messages.
    """

    #: The relay sends what comes while so many messages are waiting.
    most_waiting = 10_000

    def __init__(
        self, database: Database, destination: Destination, name: str, listeners: Listeners = EVERYWHERE
    ) -> None:
        """`listeners`: are told of sent messages."""
        self._deliver = partial(DirectDelivery, database, destination, name, listeners)
        self._abandoned = False
        self._dispatcher: Dispatcher | None
        self._reset()
        _all.add(self)

    def offer(self, number: int) -> Direct | None:
        """Return which messages this writer may send of a transaction that will hold `number` such messages.

        None if the relay must: before the compensation is known to exist, while the destination is away, and while too
        many messages are waiting.
        """
        with suppress(Exception):
            dispatcher = None if self._abandoned else self._running()
            if dispatcher is not None and dispatcher.ready and dispatcher.waiting + number <= self.most_waiting:
                return dispatcher.known
        return None

    def committed(self, sent: Sent, since: float) -> None:
        """Queue committed messages for this writer."""
        if sent.direct:
            with suppress(Exception):
                dispatcher = self._running()
                if dispatcher is not None and dispatcher.waiting <= self.most_waiting:
                    dispatcher.committed(sent.direct, since=since)

    def end(self) -> None:
        """Send all waiting messages, and none after that. Takes no lock, so the call may come from anywhere."""
        self._abandoned = True
        dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.end()

    def close(self, timeout: float = _LAST_SECONDS) -> None:
        """Send all waiting messages, and none after that; wait for at most `timeout` seconds."""
        self._abandoned = True
        self.drain(timeout)

    def drain(self, timeout: float) -> None:
        """Send all waiting messages, for at most `timeout` seconds, and end the thread; a later commit begins anew."""
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
                dispatcher = Dispatcher(self._deliver())
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
