"""Log lines about a trouble that may last for days: ever fewer of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class ThrottledLog:
    """Warnings with at least `first` seconds between two; while they keep coming, twice as many each time, up to
    `longest`.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        first: float = 5.0,
        longest: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._first = first
        self._longest = longest
        self._clock = clock
        self._every = first
        self._at = float("-inf")

    def warning(self, text: str, *values: object) -> bool:
        """Log it, unless the last line is not long ago; return whether it was logged."""
        quiet = self._clock() - self._at
        if quiet < self._every:
            return False
        # After such a silence it is another trouble.
        self._every = self._first if quiet > 2 * self._longest else min(2 * self._every, self._longest)
        self._at = self._clock()
        self._logger.warning(text, *values)
        return True
