"""What the log is told of a connection to a destination that comes and goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_SECONDS_BETWEEN_WARNINGS = 60.0


class ConnectionLog:
    """Logs that a destination is away: at first, and then once a minute; and the connection that follows.

    Every connection would be too much, because one that is lost again and again would fill the log.
    """

    def __init__(self, logger: logging.Logger, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._name = name
        self._clock = clock
        self._warned_at = float("-inf")
        self._is_news = True

    def lost(self, reason: str) -> str:
        """Log that the destination is away; return the text for a verdict."""
        text = f"{self._name}: {reason}"
        if self._clock() - self._warned_at >= _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = self._clock()
            self._is_news = True
            self._logger.warning("%s", text)
        return text

    def connected(self, where: str) -> None:
        """Log a connection, if it is the first one, or the first after a warning."""
        if self._is_news:
            self._is_news = False
            self._logger.info("%s: connected to %s", self._name, where)
