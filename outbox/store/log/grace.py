"""Grace: a position may end a window only when all its transactions have been committed for long enough."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from outbox.model.position import Capture, Position

#: Captures per grace. A message is read at most one such part of the grace later than the grace itself.
_CAPTURES = 20

Poll = tuple[timedelta, timedelta]


class Grace:
    """Captures positions as time goes by, and tells when a position is ripe.

    Held in memory only: dropped with the lease, the connection or the server, so that the next holder waits again.
    """

    def __init__(self, length: timedelta, poll: Poll, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the first capture due now.

        `poll`: the shortest and the longest pause between two captures. `clock`: returns seconds that never go back.
        """
        shortest, longest = poll
        self._length = length.total_seconds()
        self._shortest = min(max(shortest, length / _CAPTURES), longest).total_seconds()
        self._longest = longest.total_seconds()
        self._clock = clock
        self._pause = self._shortest
        self._look_at = clock()
        #: Captured positions that are not ripe yet, each with the moment at which it will be.
        self._waiting: deque[tuple[Position, float]] = deque()
        self._first: Position | None = None
        #: The newest ripe position.
        self.ripe: Position | None = None

    @property
    def young(self) -> Position | None:
        """The first captured position, until a position is ripe; else None."""
        return self._first if self.ripe is None else None

    @property
    def due_in(self) -> float:
        """Seconds until the next capture is due, or another position is ripe."""
        moment = min(self._look_at, self._waiting[0][1]) if self._waiting else self._look_at
        return max(0.0, moment - self._clock())

    def look(self, now: Callable[[], Capture]) -> Capture | None:
        """Capture a position by `now` and return it, if the next capture is due; else return None."""
        if self._clock() < self._look_at:
            return None
        capture = now()
        # Counted from the answer on, because however slow the network was, all that the position sees was committed
        # before that.
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
        """Return the newest ripe position; None while there is none."""
        now = self._clock()
        while self._waiting and self._waiting[0][1] <= now:
            self.ripe = self._waiting.popleft()[0]
        return self.ripe
