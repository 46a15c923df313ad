"""A wake-up for a worker that also waits for its database; set from any thread, or from a signal handler."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress

from outbox.runtime.fork import in_child

#: A selector rounds its timeout up to whole milliseconds, so shorter waits sleep.
_SHORTEST_SECONDS = 0.001
#: Not select(), because an application may have more descriptors open than it can watch; and not epoll, because a new
#: one for each wait costs more than the wait itself.
_Selector = getattr(selectors, "PollSelector", selectors.DefaultSelector)


class Wake:
    """Wakes one thread. A lost wake-up costs a poll interval, and no message.

    `set` takes no lock, so commit hooks and signal handlers may call it at any point.
    """

    def __init__(self) -> None:
        self._open()
        # A child would take the wake-ups of its parent.
        in_child(self._open)

    def _open(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def set(self) -> None:
        """Wake the waiting thread, or the next thread to wait. With a full buffer the thread is woken already."""
        with suppress(OSError):
            self._writer.send(b"!")

    def wait(self, seconds: float, also: int | None = None) -> bool:
        """Wait until woken, or until the descriptor `also` is readable; return False when only time has passed.

        A wait of less than a millisecond does not end early; the next one returns at once.
        """
        if 0 < seconds < _SHORTEST_SECONDS:
            time.sleep(seconds)
            return False
        with _Selector() as selector:
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
        """Close the descriptors."""
        self._reader.close()
        self._writer.close()

    def __del__(self) -> None:
        # A worker that was made and dropped is closed by nobody else. The attributes are missing when no descriptor was
        # available; then there is nothing to close.
        with suppress(AttributeError):
            self.close()
