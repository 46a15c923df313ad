"""Relay processes as a supervisor runs them, which starts them again when they end; and writers of keyed messages."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from sqlalchemy import Engine

from outbox import Outbox

ROOT = Path(__file__).parents[3]
_AGAIN_SECONDS = 0.2


class Supervised:
    """A process that is started again whenever it ends, until it is stopped."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = [sys.executable, *command]
        self._log = log
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the process by a signal, as a deployment does."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()
        self._thread.join(60)

    @property
    def said(self) -> str:
        """What it has written, over all its starts."""
        return self._log.read_text() if self._log.exists() else ""

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log)
                while self._process.poll() is None:
                    if self._stopping.wait(0.05):
                        self._process.terminate()
                        self._process.wait(60)
            self._stopping.wait(_AGAIN_SECONDS)


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


class Writers:
    """Threads that commit numbered messages of keys, each of its own ones, until they are stopped."""

    def __init__(self, engine: Engine, count: int, *, keys: int, pause: float) -> None:
        self._outbox = Outbox(engine)
        self._stopping = threading.Event()
        self._keys, self._pause = keys, pause
        self._written: list[list[tuple[str, int]]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._write, args=(number,)) for number in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> list[tuple[str, int]]:
        """End them, and return what was committed."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        return [each for written in self._written for each in written]

    def _write(self, writer: int) -> None:
        numbers = dict.fromkeys((f"w{writer}-{key}" for key in range(self._keys)), 0)
        while not self._stopping.is_set():
            chosen = random.choices(sorted(numbers), k=random.randint(1, 4))
            committed: list[tuple[str, int]] = []
            with self._outbox.begin() as session:
                for key in chosen:
                    self._outbox.send(session, "orders", str(numbers[key]), key=key)
                    committed.append((key, numbers[key]))
                    numbers[key] += 1
            self._written[writer] += committed
            time.sleep(self._pause)
