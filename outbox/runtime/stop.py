"""The stop of long work: any thread asks for a stop, and the work looks in each pause."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

from outbox.runtime.wakeup import Wake


class Stop:
    """A plain flag and a socket, without a lock, because a signal handler may ask at any point.

    Whoever starts work passes a stop down. The work may put an inner stop within the outer stop: the inner stop is
    asked when the outer stop is, and can be asked alone.
    """

    def __init__(self, within: Stop | None = None, *, wake: Callable[[], None] = lambda: None) -> None:
        """`wake`: called when a stop is asked, besides ending pauses."""
        self._within = within
        #: Replaced and never changed, because another thread may go through it.
        self._inner: tuple[ref[Stop], ...] = ()
        self._wake = wake
        self._pauses = Wake()
        self._asked = False
        if within is not None:
            within._hold(self)

    @property
    def asked(self) -> bool:
        """True when a stop was asked, here or further out, and was not withdrawn there since."""
        return self._asked or (self._within is not None and self._within.asked)

    def ask(self) -> None:
        """Ask for a stop, and end pauses at once. May be called from anywhere."""
        self._asked = True
        self._end_pauses()

    @contextmanager
    def within(self, outer: Stop) -> Iterator[None]:
        """Put this stop within an outer stop until the block ends; not if it is within another stop already."""
        self._within = outer
        outer._hold(self)
        try:
            yield
        finally:
            self._within = None

    def withdraw(self) -> None:
        """Forget that a stop was asked here, because the work has stopped, or nothing runs."""
        self._asked = False

    def rest(self, seconds: float) -> bool:
        """Sleep; return False when a stop is asked."""
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            self._pauses.wait(left)
        return not self.asked

    def _hold(self, inner: Stop) -> None:
        self._inner = (*(each for each in self._inner if each() not in (None, inner)), ref(inner))

    def _end_pauses(self) -> None:
        self._pauses.set()
        self._wake()
        for inner in self._inner:
            if (stop := inner()) is not None:
                stop._end_pauses()
