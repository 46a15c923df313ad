"""A program that stops as a machine stops that swaps: it keeps its connections, and does nothing."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from outbox.testing.servers.process import Program


class Server(Protocol):
    """A server that runs as one program."""

    _program: Program | None


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """Stop the server for as long as the block takes."""
    assert server._program is not None
    pid = server._program.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        _wait_until_stopped(pid)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _wait_until_stopped(pid: int) -> None:
    """Wait until every thread stands still: on a busy machine some work on for a moment after the signal."""
    until = time.monotonic() + 30
    while not all(_stands_still(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < until, "the program does not stop"
        time.sleep(0.01)


def _stands_still(thread: Path) -> bool:
    try:
        return "State:\tT" in (thread / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended meanwhile
