"""The processes of the demo: none outlives the demo, even after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outbox.cli.demo.writer import allowance_of
from outbox.errors import OutboxError
from outbox.testing.servers.process import Guard


class ProcessFailedError(OutboxError):
    """A process of the demo ended too early; the text ends with its output."""


class Child:
    """A Python process in another session, so that Ctrl-C reaches the demo alone."""

    def __init__(self, name: str, arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = folder / f"{name.replace(' ', '-')}.log"
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._guard: Guard | None = Guard(None)
        self._guard.watch(self._process.pid)

    def is_running(self) -> bool:
        """Return whether the process still runs; raise if the process ended with an error."""
        code = self._process.poll()
        if code is not None:
            self._let_go()
        if code:
            raise ProcessFailedError(f"{self.name} ended with {code}: {self.said()[-2000:]}")
        return code is None

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the process by SIGTERM; after 15 seconds by SIGKILL."""
        self._end(signal.SIGTERM, signal.SIGKILL)

    def said(self) -> str:
        """Return the output so far."""
        return self._log.read_text(errors="replace")

    def _end(self, *signals: signal.Signals) -> None:
        for number in signals:
            self._process.send_signal(number)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                continue
            break
        self._let_go()

    def _let_go(self) -> None:
        if self._guard is not None:
            self._guard.watch(None)
            self._guard.release()
            self._guard = None


class Staff:
    """All processes of a demo."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._children: list[Child] = []

    def writer(self, shop: str, orders: int, pause: float) -> Child:
        """Start a process of the order service."""
        return self._start(shop, ["-m", "outbox.cli.demo.writer", shop, str(orders), str(pause)])

    def allow(self, shop: str, orders: int) -> None:
        """Let a shop place orders until there are so many of the shop."""
        written = self._folder / "allowance"
        written.write_text(str(orders))
        written.replace(self._folder / allowance_of(shop))  # so that no shop reads half of a number

    def relay(self, name: str, to: str, lease: str) -> Child:
        """Start a process of `outbox relay`."""
        command = "import sys; from outbox.cli import main; sys.argv[0] = 'outbox'; main()"
        return self._start(name, ["-c", command, "relay", "--to", to, "--lease", lease])

    def close(self) -> None:
        """Kill all processes."""
        for child in self._children:
            child.kill()

    def _start(self, name: str, arguments: Sequence[str]) -> Child:
        child = Child(name, arguments, folder=self._folder, environment=self._environment)
        self._children.append(child)
        return child
