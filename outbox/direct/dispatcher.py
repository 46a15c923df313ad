"""The dispatcher of direct sends: a queue of committed messages, and the thread that has them delivered in time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from outbox.direct.delivery import MOST_AT_ONCE, DirectDelivery
from outbox.runtime.clock import clock
from outbox.runtime.linger import Linger
from outbox.store.log.append import Direct, LogRef

#: For so long nothing is sent directly after the destination was away; or when a round takes longer than this.
_PAUSE_SECONDS = 1.0
_LONGEST_WAIT = 30.0


class _Committed(NamedTuple):
    """The messages of one transaction; their sending has to begin before the moment `until`."""

    refs: Sequence[LogRef]
    until: float


class _Alarm:
    """Wakes the thread of a dispatcher, which waits for news."""

    def __init__(self, news: SimpleQueue[_Committed | None]) -> None:
        self._news = news

    def set(self) -> None:
        """Wake it."""
        self._news.put(None)


class Dispatcher:
    """A queue, and a daemon thread that handles what is put into it, until it is told to end.

    Commit hooks, signal handlers and finalizers only put into the queue, whose `put` may be called while another `put`
    is under way. Only the thread uses everything else.
    """

    def __init__(self, delivery: DirectDelivery) -> None:
        self._delivery = delivery
        self._news: SimpleQueue[_Committed | None] = SimpleQueue()
        self._alarm = _Alarm(self._news)
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
        """Send these messages, whose commit began at the moment `since`, while their time for direct sends lasts."""
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
            if self._delivery.wants_refresh:
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
        """Take the next messages, about as many as are read at once.

        Drop those whose time for direct sends is over: the compensation sends them.
        """
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
            for call in self._delivery.deliver(claims, self._alarm):
                self._listen(max(0.0, self._delivery.look(call) - time.monotonic()))
        except Exception:
            for committed in _left(batch, claims):
                self._due.append(committed)
                self._count(len(committed.refs))
            raise
        # The claims that are left now were rolled back to a savepoint.
        if self._delivery.away:
            self._away_until = clock() + _PAUSE_SECONDS
        if not full:
            time.sleep(self._linger.after(len(batch)))


def _left(batch: list[_Committed], claims: Collection[LogRef]) -> Iterator[_Committed]:
    """Yield the part of a batch that is still claimed."""
    for committed in batch:
        refs = [ref for ref in committed.refs if ref in claims]
        if refs:
            yield committed._replace(refs=refs)
