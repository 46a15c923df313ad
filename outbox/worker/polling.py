"""How long a worker waits for a hint before it looks at the log without one."""

from __future__ import annotations

from collections.abc import Callable

from outbox.clock import clock as now
from outbox.pace import BUSY_SECONDS

#: Where messages follow each other faster than this, their writers may be saving hints; so many messages in a row that
#: came without one, or with one, tell whether they are.
_MANY_SECONDS, _IN_A_ROW = 3 * BUSY_SECONDS, 2
#: Then there are four looks for each message, but none sooner than this; until none has come for so long.
_LOOKS, _SHORTEST_SECONDS, _PATIENCE_SECONDS = 4, 0.0003, 0.1
#: The seconds between messages are averaged over about so many looks.
_AVERAGED = 8


class Polling:
    """Pauses from `shortest` to `longest`, in seconds; where writers save hints, parts of the time between messages.

    A writer that commits often hints twenty times a second, because a worker that is busy anyway needs no hints.
    """

    def __init__(self, shortest: float, longest: float, *, clock: Callable[[], float] = now) -> None:
        self._shortest = shortest
        self._longest = longest
        self._clock = clock
        #: Between two messages, in seconds, on the average.
        self._between = _PATIENCE_SECONDS
        self._came_at = clock() - _PATIENCE_SECONDS
        self._next = shortest
        self._hinted = self._hints_are_saved = False
        self._otherwise = 0

    def came(self, messages: int) -> None:
        """Note that a look has found so many."""
        at = self._clock()
        between = min(at - self._came_at, _PATIENCE_SECONDS) / messages
        self._between += (between - self._between) / _AVERAGED
        self._came_at = at
        self._next = self._shortest
        self._otherwise = self._otherwise + 1 if self._hinted == self._hints_are_saved else 0
        if self._otherwise == _IN_A_ROW:
            self._hints_are_saved, self._otherwise = not self._hints_are_saved, 0
        self._hinted = False

    def hinted(self) -> None:
        """Note that a hint came."""
        self._hinted = True
        self._next = self._shortest

    def pause(self) -> float:
        """Return for how many seconds to wait, after a look that found nothing."""
        are_many = self._between < _MANY_SECONDS and self._clock() - self._came_at < _PATIENCE_SECONDS
        if are_many and self._hints_are_saved:
            return min(max(self._between / _LOOKS, _SHORTEST_SECONDS), self._shortest)
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause
