"""A server that stops as a machine stops that swaps: it keeps its connections, and does nothing."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil

from outbox.testing.servers.process import Program


class Server(Protocol):
    """A server that runs as one program, which may start others."""

    _program: Program | None


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """Stop the server, and what it has started, for as long as the block takes."""
    assert server._program is not None
    program = psutil.Process(server._program.pid)
    program.suspend()  # first, so that it starts no more
    processes = [program, *program.children(recursive=True)]
    try:
        for process in processes[1:]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        _wait_until_stopped(processes)
        yield
    finally:
        for process in reversed(processes):
            with suppress(psutil.NoSuchProcess):
                process.resume()


def _wait_until_stopped(processes: Sequence[psutil.Process]) -> None:
    """Wait until every thread stands still: on a busy machine some threads work on for a moment after the signal."""
    until = time.monotonic() + 30
    while not all(_stands_still(thread) for each in processes for thread in Path(f"/proc/{each.pid}").glob("task/*")):
        assert time.monotonic() < until, "the server does not stop"
        time.sleep(0.01)


def _stands_still(thread: Path) -> bool:
    """Return whether a thread is stopped, or has ended."""
    try:
        state = (thread / "status").read_text().partition("State:\t")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "TZX"
