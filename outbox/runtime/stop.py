"""The stop of work that runs for a long time: any thread asks for it, and the work looks at it in each pause."""

from __future__ import annotations

import time
from weakref import WeakSet

from outbox.runtime.wakeup import Wake


class Stop:
    """A plain flag and a socket. It has no lock, because a signal handler may ask at any point.

    Whoever starts work passes a stop down. The work may put one of its own within that one: it is asked when the outer
    one is, and can be asked alone.
    """

    def __init__(self, within: Stop | None = None, *, wake: Wake | None = None) -> None:
        """`wake`: also set when a stop is asked; None: a new one."""
        self._within = within
        self._inner: WeakSet[Stop] = WeakSet()
        self._wake = wake or Wake()
        self._asked = False
        if within is not None:
            within._inner.add(self)

    @property
    def asked(self) -> bool:
        """True when a stop was asked, here or further out, and was not withdrawn there since."""
        return self._asked or (self._within is not None and self._within.asked)

    def ask(self) -> None:
        """Ask for a stop, and end pauses at once. May be called from anywhere."""
        self._asked = True
        self._end_pauses()

    def withdraw(self) -> None:
        """Forget that a stop was asked here, because it was followed, or there is nothing to stop."""
        self._asked = False

    def rest(self, seconds: float) -> bool:
        """Sleep; return False when a stop is asked."""
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)
        return not self.asked

    def _end_pauses(self) -> None:
        self._wake.set()
        for inner in tuple(self._inner):
            inner._end_pauses()
