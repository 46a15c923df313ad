"""A server program of this process alone: started on a free port in a temporary folder, stopped and removed again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Self

from outbox.errors import OutboxError
from outbox.testing.servers.process import Account, Guard, Program, ServerFailedError, free_port, scratch_folder

NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


class ServerMissing(OutboxError):  # noqa: N818 - the state of the machine, not a mistake
    """A server program is not installed; the text names the package to install."""


class LocalServer:
    """A server program of this process alone: `start`, `stop`, `kill` as often as needed; `close` removes the data.

    A folder given by the caller stays.
    """

    _stop_signals: ClassVar[Sequence[signal.Signals]] = (signal.SIGINT,)

    def __init__(self, name: str, directory: Path | None, account: Account | None, *, in_memory: bool = False) -> None:
        self.folder = (directory or scratch_folder(name, account, in_memory=in_memory)).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._account = account
        self._owner = os.getpid()
        self._guard = Guard(None if directory else self.folder)
        self._program: Program | None = None
        self._tries = 3
        self._has_answered = False

    def start(self) -> Self:
        """Start, or start again on the same data and port; return when the server answers, or raise."""
        if self._program is not None and self._program.running():
            return self
        for _ in range(self._tries):
            self._program = Program(self._command(), log=self._log, account=self._account)
            self._guard.watch(self._program.pid)
            if self._comes_up(self._program):
                self._tries, self._has_answered = 3, True
                return self
            self._guard.watch(None)
            if not self._has_answered:  # another program may have taken the port, and no client knows it yet
                self.port = free_port()
            time.sleep(0.25)
        raise ServerFailedError(f"{type(self).__name__} did not start: {self._log_tail()}")

    def stop(self) -> None:
        """End the server in an orderly way; the data stays for another `start`."""
        self._end(self._stop_signals)

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash does, and wait for the end."""
        self._end(())
        # What a killed server leaves behind (other processes, locks) may prevent a new start for some seconds.
        self._tries = 60

    def restart(self) -> Self:
        """Stop and start again, on the same data and port."""
        self.stop()
        return self.start()

    def close(self) -> None:
        """Stop, and remove the data. A forked child's copy does nothing: the server belongs to the parent."""
        if os.getpid() == self._owner:
            self.stop()
            self._guard.release()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _log(self) -> Path:
        return self.folder / "server.log"

    def _command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def _answers(self) -> bool:
        """Return whether our own server answers on our port; another program may listen there instead."""
        raise NotImplementedError

    def _comes_up(self, program: Program, patience: float = 120.0) -> bool:
        deadline = time.monotonic() + patience
        while program.running():
            if self._answers():
                return True
            if time.monotonic() > deadline:
                program.end(())
            time.sleep(0.02)
        return False

    def _end(self, signals: Sequence[signal.Signals]) -> None:
        if self._program is not None:
            self._program.end(signals)
            self._program = None
            self._guard.watch(None)

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else "it wrote no log"
