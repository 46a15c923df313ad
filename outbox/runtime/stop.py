"""The stop of work that runs for a long time: any thread asks for it, and the work looks at it in each pause."""

from __future__ import annotations

import time

from outbox.runtime.wakeup import Wake


class Stop:
    """A plain flag and a socket. It has no lock, because a signal handler may ask at any point."""

    def __init__(self) -> None:
        self._wake = Wake()
        #: True when a stop was asked, and not withdrawn since.
        self.asked = False

    def ask(self) -> None:
        """Ask for a stop, and end pauses at once. May be called from anywhere."""
        self.asked = True
        self._wake.set()

    def withdraw(self) -> None:
        """Forget that a stop was asked, because it was followed, or there is nothing to stop."""
        self.asked = False

    def rest(self, seconds: float) -> bool:
        """Sleep; return False when a stop is asked."""
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)
        return not self.asked
