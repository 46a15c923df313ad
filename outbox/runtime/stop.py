"""A stop that was asked: made by whoever starts something, and looked at in each pause."""

from __future__ import annotations

import time

from outbox.runtime.wakeup import Wake


class Stop:
    """A plain flag and a socket, no lock: a signal handler may ask in the middle of anything."""

    def __init__(self) -> None:
        self._wake = Wake()
        #: Whether a stop was asked, and not withdrawn since.
        self.asked = False

    def ask(self) -> None:
        """End what looks at this, and its pauses at once. May be called from anywhere."""
        self.asked = True
        self._wake.set()

    def withdraw(self) -> None:
        """Forget that it was asked, because it was followed or nobody will."""
        self.asked = False

    def rest(self, seconds: float) -> bool:
        """Sleep; False when a stop is asked."""
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)
        return not self.asked
