"""A private Redis, and where its program is."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from outbox.testing.servers.local import NO_SETTINGS, LocalServer, ServerMissing


class RedisServer(LocalServer):
    """A Redis of this process alone. It writes its log to disk once a second. `settings` are its own, by name."""

    _stop_signals = (signal.SIGTERM,)

    def __init__(self, *, settings: Mapping[str, str] = NO_SETTINGS, directory: Path | None = None) -> None:
        self._redis = _redis_program()
        super().__init__("redis", directory, None)
        self._settings = {"save": "", "appendonly": "yes", "appendfsync": "everysec", **settings}

    @property
    def url(self) -> str:
        """The URL that a Redis client connects to."""
        return f"redis://127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        settings = {"bind": "127.0.0.1", "port": str(self.port), "dir": str(self.folder), **self._settings}
        return [self._redis, *(part for name, value in settings.items() for part in (f"--{name}", value))]

    def _answers(self) -> bool:
        """Return whether our server answers, and has read its log; with a password it refuses to say."""
        assert self._program is not None
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as client:
                # INFO is answered while the log is read; PING is refused then.
                client.sendall(b"INFO server\r\nPING\r\nQUIT\r\n")
                answer = client.makefile("rb").read()
        except OSError:
            return False
        is_ours = f"process_id:{self._program.pid}\r".encode() in answer
        return answer.startswith(b"-NOAUTH") or (is_ours and b"\r\n+PONG\r\n" in answer)


def _redis_program() -> Path:
    """Return the path of a Redis or Valkey server on the PATH.

    Raises:
        ServerMissing: there is none.
    """
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise ServerMissing("no Redis server program: install redis-server or valkey-server")
    return Path(found)
