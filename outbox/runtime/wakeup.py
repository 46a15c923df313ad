"""A wake-up that a worker waits on beside its database; set from any thread, or from a signal handler."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress

#: A selector rounds its timeout up to whole milliseconds, so shorter waits sleep.
_SHORTEST_SECONDS = 0.001


class Wake:
    """A hint, never a delivery: losing one costs a poll interval."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def set(self) -> None:
        """Wake whoever waits; a full buffer means that it has been told already."""
        with suppress(OSError):
            self._writer.send(b"!")

    def wait(self, seconds: float, also: int | None = None) -> bool:
        """Wait until woken, or until the descriptor `also` is readable; False when only time has passed.

        A wait of less than a millisecond does not end early; the next one returns at once.
        """
        if 0 < seconds < _SHORTEST_SECONDS:
            time.sleep(seconds)
            return False
        # Not select(): an application may have more descriptors open than that one can watch.
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            if also is not None:
                selector.register(also, selectors.EVENT_READ)
            readable = {key.fd for key, _ in selector.select(max(0.0, seconds))}
        if self._reader.fileno() in readable:
            with suppress(OSError):
                while self._reader.recv(4096):
                    pass
        return bool(readable)

    def close(self) -> None:
        """Give the descriptors back."""
        self._reader.close()
        self._writer.close()

    def __del__(self) -> None:
        # Nobody closes a worker that was made and dropped. Nor is there anything to close where no descriptor was left.
        with suppress(AttributeError):
            self.close()
