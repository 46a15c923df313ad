"""Grace: a position ends a window only when everything that it sees has been committed for long enough."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from outbox.model.position import Capture, Position

#: Captures per grace: so much later than the grace, in parts of it, a message may be read at worst.
_CAPTURES = 20

Poll = tuple[timedelta, timedelta]
POLL: Poll = (timedelta(milliseconds=50), timedelta(seconds=1))


class Grace:
    """Captures positions as time goes by, and tells which of them are ripe.

    It is all in memory, and goes with the lease, the connection or the server's incarnation: whoever comes next waits
    for the grace again.
    """

    def __init__(self, length: timedelta, poll: Poll = POLL, clock: Callable[[], float] = time.monotonic) -> None:
        """`poll`: the shortest and the longest pause between two captures; `clock`: seconds that never go back."""
        shortest, longest = poll
        self._length = length.total_seconds()
        self._shortest = min(max(shortest, length / _CAPTURES), longest).total_seconds()
        self._longest = longest.total_seconds()
        self._clock = clock
        self._pause = self._shortest
        self._look_at = clock()
        #: Positions, each with the moment at which it is ripe.
        self._waiting: deque[tuple[Position, float]] = deque()
        self._first: Position | None = None
        self._some_ripe = False
        #: The newest that is ripe.
        self.ripe: Position | None = None

    @property
    def young(self) -> Position | None:
        """The first position that was captured, until it is ripe."""
        return None if self._some_ripe else self._first

    @property
    def due_in(self) -> float:
        """Seconds until there is something to capture, or another position is ripe."""
        moment = min(self._look_at, self._waiting[0][1]) if self._waiting else self._look_at
        return max(0.0, moment - self._clock())

    def look(self, now: Callable[[], Capture]) -> Capture | None:
        """Capture a position by `now`, if it is time to."""
        if self._clock() < self._look_at:
            return None
        capture = now()
        # Counted from the answer on: what the position sees was committed before that, whatever the network did.
        at = self._clock()
        newest = self._waiting[-1][0] if self._waiting else self.ripe
        if capture.position != newest:
            self._waiting.append((capture.position, at + self._length))
            self._pause = self._shortest
        else:
            self._pause = min(2 * self._pause, self._longest)
        if self._first is None:
            self._first = capture.position
        self._look_at = at + self._pause
        return capture

    def ripen(self) -> Position | None:
        """The newest position that is ripe; None before there is one."""
        now = self._clock()
        while self._waiting and self._waiting[0][1] <= now:
            self.ripe = self._waiting.popleft()[0]
            self._some_ripe = True
        return self.ripe
