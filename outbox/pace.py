"""The pace of threads that follow commits: they deal with all commits of one pause together."""

from __future__ import annotations

from collections.abc import Callable

from outbox.clock import clock as now

#: Where commits follow each other faster than this, what is done for each of them costs more than it brings.
_BUSY_SECONDS = 0.004
#: Ten commits may come at once without being taken for many: random arrivals come in small crowds.
_CROWD_SECONDS = 10 * _BUSY_SECONDS


class Pace:
    """Pauses of `shortest` seconds, so that a single commit is not waited for; of `longest` while there are many."""

    def __init__(self, longest: float = 0.05, shortest: float = 0.01, *, clock: Callable[[], float] = now) -> None:
        self._longest = longest
        self._shortest = shortest
        self._clock = clock
        #: A leaky bucket, in seconds: each commit adds `_BUSY_SECONDS`, and time empties it.
        self._load = 0.0
        self._at = clock()

    def after(self, commits: int) -> float:
        """Seconds to pause, after so many commits since this was asked before."""
        at = self._clock()
        self._load = max(0.0, self._load - (at - self._at)) + commits * _BUSY_SECONDS
        self._load, self._at = min(self._load, _CROWD_SECONDS + self._longest), at
        return self._longest if self._load > _CROWD_SECONDS else self._shortest
