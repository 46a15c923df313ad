"""Log lines about a failure that may last for days: the longer the failure, the rarer the lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping

#: So many different things are kept in mind.
_MOST = 10_000
#: The shortest and the longest time between two lines about one failure, in seconds.
_FIRST, _LONGEST = 5.0, 60.0


class ThrottledLog:
    """Logs warnings with at least 5 seconds between two.

    While they keep coming, that time doubles with each line, up to 60 seconds.
    """

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._every = _FIRST
        self._at = float("-inf")

    def warning(self, text: str, *values: object, extra: Mapping[str, object] | None = None) -> bool:
        """Log a warning, unless the last warning is recent; return whether it was logged. `extra`: as for a logger."""
        quiet = self._clock() - self._at
        if quiet < self._every:
            return False
        # After so long without a call the failure is another one.
        self._every = _FIRST if quiet > 2 * _LONGEST else min(2 * self._every, _LONGEST)
        self._at = self._clock()
        self._logger.warning(text, *values, extra=extra)
        return True


class Throttle:
    """Tells what may be logged: each thing at once, and then again after `every` seconds."""

    def __init__(self, every: float = 60.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._logged_at: dict[Hashable, float] = {}

    def allows(self, what: Hashable) -> bool:
        """Return whether `what` may be logged now; if so, it counts as logged."""
        now = self._clock()
        if now - self._logged_at.get(what, float("-inf")) < self._every:
            return False
        if len(self._logged_at) >= _MOST:
            self.forget()
        self._logged_at[what] = now
        return True

    def forget(self) -> None:
        """Allow each thing at once again."""
        self._logged_at.clear()
