"""A value that is made of files, and made again when a file has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from outbox.runtime.clock import clock as monotonic
from outbox.runtime.throttled_log import ThrottledLog

logger = logging.getLogger("outbox")

T = TypeVar("T")

#: Files are looked at again after so many seconds.
EVERY_SECONDS = 1.0


class Reloaded(Generic[T]):
    """Keeps a value of files up to date. While changed files cannot be used, the value stays, and the log says why."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T], *, clock: Callable[[], float] = monotonic) -> None:
        """`read`: makes the value of the files; raises a `ValueError` if that cannot be done, the first time here."""
        self._files, self._read, self._clock = files, read, clock
        self._log = ThrottledLog(logger, clock=clock)
        self._looked = clock()
        # Marks come before the contents: what changes in between is read again.
        self._marks = self._marked()
        self._value = read()

    def value(self) -> T:
        """Return the value of the files as they were a second ago at most."""
        now = self._clock()
        if now - self._looked >= EVERY_SECONDS:
            self._looked = now
            marks = self._marked()
            if marks != self._marks:
                try:
                    self._value, self._marks = self._read(), marks
                except ValueError as error:
                    self._log.warning("%s; the contents read before stay in use", error)
        return self._value

    def _marked(self) -> list[tuple[int, ...] | None]:
        return [_mark(file) for file in self._files]


def _mark(file: Path) -> tuple[int, ...] | None:
    """Return what changes with a file; None if there is no file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
