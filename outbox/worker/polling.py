"""How long a worker waits for a hint before it looks at the log without one."""

from __future__ import annotations

from collections.abc import Callable

from outbox.clock import clock as now
from outbox.pace import BUSY_SECONDS

#: Messages are many where less than this, in seconds, lies between two of them on the average.
_MANY_SECONDS = 3 * BUSY_SECONDS
#: After this number of finds in a row without a hint, writers are taken to save hints; after as many with one, not.
_IN_A_ROW = 2
#: While they do, the worker looks four times for each message, with pauses of at least 0.3 ms, until no message has
#: come for 0.1 s.
_LOOKS, _SHORTEST_SECONDS, _PATIENCE_SECONDS = 4, 0.0003, 0.1
#: The weight of one find in the average is one eighth.
_AVERAGED = 8


class Polling:
    """The pauses between looks: from `shortest` to `longest` seconds, doubled after each look that finds nothing.

    A writer that commits often sends a hint only every 50 ms. While messages are many and come without hints, a pause
    is a quarter of the average time between two messages.
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
        #: Finds in a row that contradict `_hints_are_saved`.
        self._contrary = 0

    def came(self, messages: int) -> None:
        """Note that a look has found this number of messages."""
        at = self._clock()
        between = min(at - self._came_at, _PATIENCE_SECONDS) / messages
        self._between += (between - self._between) / _AVERAGED
        self._came_at = at
        self._next = self._shortest
        self._contrary = self._contrary + 1 if self._hinted == self._hints_are_saved else 0
        if self._contrary == _IN_A_ROW:
            self._hints_are_saved, self._contrary = not self._hints_are_saved, 0
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
