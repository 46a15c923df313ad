"""Processes as a supervisor runs them: a process that ends is started again."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.programs import NOTHING_MORE, Program


class Supervised:
    """A Python program that is started again `pause` seconds after its end, until it is stopped.

    `environment`: more variables than those of this process. `program`: starts it.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] = NOTHING_MORE,
        pause: float = 0.2,
        program: Callable[..., Program | subprocess.Popen[str]] = Program,
    ) -> None:
        self._command = command
        self._program = program
        self._log = log
        self._environment = environment
        self._pause = pause
        self._stopping = threading.Event()
        self._process: Program | subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> int | None:
        """End the process by a signal, as a deployment does; return its exit code."""
        self._stopping.set()
        self._thread.join()
        return None if self._process is None else self._process.returncode

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process that runs now; to one that has ended it does nothing."""
        if self._process is not None:
            self._process.send_signal(number)

    @property
    def pid(self) -> int | None:
        """The process id; None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def said(self) -> str:
        """What it has written, over all its starts."""
        return self._log.read_text() if self._log.exists() else ""

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._log.open("ab") as log:
                self._process = self._program(self._command, environment=self._environment, stdout=log, stderr=log)
                while self._process.poll() is None:
                    if self._stopping.wait(0.05):
                        self._end(self._process)
            self._stopping.wait(self._pause)

    @staticmethod
    def _end(process: Program | subprocess.Popen[str]) -> None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def supervised(commands: Sequence[Sequence[str]], folder: Path) -> Iterator[list[Supervised]]:
    """Run these programs side by side meanwhile."""
    found = [Supervised(command, folder / f"process-{number}.log") for number, command in enumerate(commands)]
    try:
        for each in found:
            each.start()
        yield found
    finally:
        for each in found:
            each.stop()
