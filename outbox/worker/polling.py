"""The pauses of a worker: how long to wait for a hint before a look at the log without a hint."""

from __future__ import annotations

from collections.abc import Callable

from outbox.runtime.clock import clock as now
from outbox.runtime.linger import BUSY_SECONDS

#: Messages are many when the average time between two of them, in seconds, is less than this.
_MANY_SECONDS = 3 * BUSY_SECONDS
#: While writers pause their hints, the worker looks eight times for each message, with pauses of at least 0.1 ms, until
#: no message has come for 0.1 s.
_LOOKS, _SHORTEST_SECONDS, _PATIENCE_SECONDS = 8, 0.0001, 0.1
#: The next hint may come as late as this many pauses of the writers after the last one.
_LATE = 2
#: After so many finds in a row without a hint, none is expected: SQLite has none, and a pooler may drop them.
_UNHINTED = 3
#: The weight of one find in the average is one eighth.
_AVERAGED = 8


class Polling:
    """The pauses between looks: from `shortest` to `longest` seconds, doubled after each look without a find.

    A writer that commits often pauses between its hints, and says so in each. While messages are many and no hint is
    expected, a pause is an eighth of the average time between two messages.
    """

    def __init__(self, shortest: float, longest: float, *, clock: Callable[[], float] = now) -> None:
        self._shortest = shortest
        self._longest = longest
        self._clock = clock
        #: The average time between two messages, in seconds.
        self._between = _PATIENCE_SECONDS
        self._came_at = clock() - _PATIENCE_SECONDS
        self._next = shortest
        #: Until when writers may pause their hints.
        self._pause_ends = self._came_at
        self._finds_since_hint = 0

    @property
    def many(self) -> bool:
        """True while messages come in quick succession."""
        return self._between < _MANY_SECONDS and self._clock() - self._came_at < _PATIENCE_SECONDS

    def came(self, messages: int) -> None:
        """Note a look that found so many messages."""
        at = self._clock()
        between = min(at - self._came_at, _PATIENCE_SECONDS) / messages
        self._between += (between - self._between) / _AVERAGED
        self._came_at = at
        self._next = self._shortest
        self._finds_since_hint += 1
        if self._finds_since_hint >= _UNHINTED:
            self._pause_ends = max(self._pause_ends, at + _PATIENCE_SECONDS)

    def hinted(self, pause: float = 0.0) -> None:
        """Note that a hint came. `pause`: for how many seconds none may follow, although messages come."""
        self._next = self._shortest
        self._finds_since_hint = 0
        if pause:
            self._pause_ends = self._clock() + _LATE * pause

    def pause(self) -> float:
        """Return for how many seconds to wait, after a look without a find."""
        if self._clock() < self._pause_ends and self.many:
            return min(max(self._between / _LOOKS, _SHORTEST_SECONDS), self._shortest)
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause
