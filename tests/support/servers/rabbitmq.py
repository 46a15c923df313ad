"""A private RabbitMQ, and where its programs are."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from outbox.testing.servers.local import NO_SETTINGS, LocalServer, ServerMissing
from outbox.testing.servers.process import free_port, run_to_end


class RabbitServer(LocalServer):
    """A RabbitMQ of this process alone, open to the user `guest` on the loopback interface.

    `settings` are lines of its `rabbitmq.conf` by name, `plugins` the names of those that it loads.
    """

    _stop_signals = (signal.SIGTERM,)
    #: Erlang's port mapper would become a daemon that outlives the server. Started here, it belongs to the same process
    #: group, and ends with it.
    _SCRIPT = 'epmd -address 127.0.0.1 -port "$ERL_EPMD_PORT" & exec "$0"'

    def __init__(
        self,
        *,
        settings: Mapping[str, str] = NO_SETTINGS,
        plugins: Sequence[str] = (),
        directory: Path | None = None,
    ) -> None:
        self._programs = _rabbitmq_programs()
        super().__init__("rabbitmq", directory, None)
        # By default it would block all publishers on a machine whose memory or disk others have filled.
        limits = {"vm_memory_high_watermark.absolute": "512MB", "disk_free_limit.absolute": "50MB"}
        self._settings = limits | dict(settings)
        self._plugins = plugins
        self._variables: list[str] = []
        self._log_before = 0

    @property
    def url(self) -> str:
        """The URL of its virtual host `/`, for its user `guest`."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def control(self, *arguments: str) -> None:
        """Run `rabbitmqctl` with these arguments on the server, which has to be running.

        Raises:
            ServerFailedError: it failed; the text ends with what it said.
        """
        run_to_end(self._in_its_environment(self._programs / "rabbitmqctl", *arguments), account=None, cwd=self.folder)

    def _command(self) -> Sequence[str | Path]:
        lines = (f"{name} = {value}\n" for name, value in self._settings.items())
        (self.folder / "rabbitmq.conf").write_text("".join(lines))
        (self.folder / "enabled_plugins").write_text(f"[{','.join(self._plugins)}].")
        self._log_before = self._log.stat().st_size if self._log.exists() else 0
        variables = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": self.folder,
            "LC_ALL": "C.UTF-8",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": free_port(),
            "RABBITMQ_CONF_ENV_FILE": self.folder / "none",
            "RABBITMQ_CONFIG_FILE": self.folder / "rabbitmq",
            "RABBITMQ_DIST_PORT": free_port(),
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "enabled_plugins",
            "RABBITMQ_LOG_BASE": self.folder / "log",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": self.folder / "data",
            "RABBITMQ_NODENAME": f"outbox{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_PID_FILE": self.folder / "pid",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script then becomes the server, instead of its parent
        }
        self._variables = [f"{name}={value}" for name, value in variables.items()]
        return self._in_its_environment("/bin/sh", "-c", self._SCRIPT, self._programs / "rabbitmq-server")

    def _in_its_environment(self, *command: str | Path) -> Sequence[str | Path]:
        """Return a command that runs without any variable of ours, some of which configure another RabbitMQ."""
        return ["env", "-i", *self._variables, *command]

    def _answers(self) -> bool:
        # The port opens before the server is ready, and its log is ours alone.
        with self._log.open("rb") as log:
            log.seek(self._log_before)
            return b"Server startup complete" in log.read()


def _rabbitmq_programs() -> Path:
    """Return the folder with `rabbitmq-server` and `rabbitmqctl`: what `OUTBOX_TEST_RABBITMQ_BIN` names, or Debian's.

    The programs of these names on Debian's PATH are others: they change to the account `rabbitmq`.

    Raises:
        ServerMissing: there is none.
    """
    chosen = os.environ.get("OUTBOX_TEST_RABBITMQ_BIN")
    folder = Path(chosen or "/usr/lib/rabbitmq/bin")
    if not (folder / "rabbitmq-server").exists():
        where = f" in OUTBOX_TEST_RABBITMQ_BIN={chosen}" if chosen else ""
        raise ServerMissing(
            f"no RabbitMQ server programs{where}: apt-get install rabbitmq-server, or install your system's RabbitMQ"
            " and set OUTBOX_TEST_RABBITMQ_BIN to the folder of its programs"
        )
    return folder
