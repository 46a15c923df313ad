"""The pace of those who follow commits: what is committed while they pause, they deal with together."""

from __future__ import annotations

_SHORT_SECONDS = 0.01
#: Where commits follow each other faster than this, what is done for each of them costs more than it brings.
_BUSY_SECONDS = 0.004


class Pace:
    """Short pauses, so that a single commit is not waited for; of `longest` seconds while there are many."""

    def __init__(self, longest: float = 0.05) -> None:
        self._longest = longest
        self._pause = _SHORT_SECONDS

    def after(self, commits: int) -> float:
        """Seconds to pause, after so many commits since the last pause began."""
        busy = commits * _BUSY_SECONDS > self._pause
        self._pause = self._longest if busy else _SHORT_SECONDS
        return self._pause
