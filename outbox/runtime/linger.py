"""The pace of threads that follow commits: all commits of a pause are dealt with together."""

from __future__ import annotations

from collections.abc import Callable

from outbox.runtime.clock import clock as now

#: When commits follow each other faster than this, work for each single commit costs more than it saves.
BUSY_SECONDS = 0.004
#: The load of ten commits: so many may come at once and do not count as many, because random arrivals come in groups.
_CROWD_SECONDS = 10 * BUSY_SECONDS


class Linger:
    """Pauses of `shortest` seconds, so that a single commit is not waited for; of `longest` while there are many."""

    def __init__(self, longest: float, shortest: float, *, clock: Callable[[], float] = now) -> None:
        self._longest = longest
        self._shortest = shortest
        self._clock = clock
        #: A leaky bucket, in seconds: each commit adds `BUSY_SECONDS`, and time empties it.
        self._load = 0.0
        self._at = clock()

    def after(self, commits: int) -> float:
        """Return for how many seconds to pause, after so many commits since the previous call."""
        at = self._clock()
        passed, self._at = at - self._at, at
        load = commits * BUSY_SECONDS
        if passed < self._longest:
            self._load = max(0.0, self._load - passed) + load
        else:
            # After a long pause only its own commits count: a bucket that is nearly full would soon cause another.
            self._load = 0.0 if load < passed else _CROWD_SECONDS
        return self._longest if self._load >= _CROWD_SECONDS else self._shortest
