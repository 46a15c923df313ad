"""The pace of threads that follow commits: they deal with all commits of one pause together."""

from __future__ import annotations

from collections.abc import Callable

from outbox.runtime.clock import clock as now

#: Where commits follow each other faster than this, what is done for each of them costs more than it brings.
BUSY_SECONDS = 0.0033
#: So many commits may come at once without being taken for many: random arrivals come in crowds.
_CROWD_SECONDS = 10 * BUSY_SECONDS


class Linger:
    """Pauses of `shortest` seconds, so that a single commit is not waited for; of `longest` while there are many."""

    def __init__(self, longest: float = 0.05, shortest: float = 0.01, *, clock: Callable[[], float] = now) -> None:
        self._longest = longest
        self._shortest = shortest
        self._clock = clock
        #: A leaky bucket, in seconds: each commit adds `BUSY_SECONDS`, and time empties it.
        self._load = 0.0
        self._at = clock()

    def after(self, commits: int) -> float:
        """Seconds to pause, after so many commits since this was asked before."""
        at = self._clock()
        passed, self._at = at - self._at, at
        load = commits * BUSY_SECONDS
        if passed < self._longest:
            self._load = max(0.0, self._load - passed) + load
        else:
            # A long pause is judged by its own commits: a bucket that stays nearly full would end in another one soon.
            self._load = 0.0 if load < passed else _CROWD_SECONDS
        return self._longest if self._load >= _CROWD_SECONDS else self._shortest
