"""A server that stops as a machine stops that swaps: it keeps its connections, and does nothing."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from outbox.testing.servers import LocalServer


@contextmanager
def paused(server: LocalServer) -> Iterator[None]:
    """Stop the server for as long as the block takes."""
    assert server._program is not None
    os.kill(server._program.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server._program.pid, signal.SIGCONT)
