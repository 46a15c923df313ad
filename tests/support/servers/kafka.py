"""A private Kafka broker, which Maven fetches."""

from __future__ import annotations

import base64
import os
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from outbox.testing.servers.local import NO_SETTINGS, LocalServer
from outbox.testing.servers.process import free_port, run_to_end
from tests.support.servers.maven import class_path

_KAFKA = "4.3.1"
_LOG4J = "2.25.4"


class KafkaServer(LocalServer):
    """A Kafka broker of this process alone, its own controller. `settings` are its own, by name.

    A topic that is not there is created at its first use, as Kafka does unless it is told otherwise. A client goes on
    to the address that a broker tells it. `far` makes a way through a proxy: one more port that the broker listens on,
    and the port that it tells those who come there.

    `tls`, the files of a certificate and of its key, makes one more port, `safe_port`, with TLS and passwords. `users`
    are the passwords of those who may come there by SCRAM-SHA-512, by name. `listeners` are further ways in by their
    names, each like `far`; `settings` say what a listener wants.
    """

    _stop_signals = (signal.SIGTERM,)

    def __init__(
        self,
        *,
        settings: Mapping[str, str] = NO_SETTINGS,
        directory: Path | None = None,
        far: tuple[int, int] | None = None,
        tls: tuple[Path, Path] | None = None,
        users: Mapping[str, str] = NO_SETTINGS,
        listeners: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self._class_path = _kafka_class_path()
        super().__init__("kafka", directory, None)
        self._controller = free_port()
        # A random id could begin with a dash, which the command that formats the storage would take for an option.
        self._cluster = base64.urlsafe_b64encode(b"outbox" + os.urandom(10)).decode().rstrip("=")
        self._settings = settings
        self._ways = {"FAR": far} if far else {}
        self._tls = tls
        self.safe_port = free_port()
        self._ways |= {"SAFE": (self.safe_port, self.safe_port)} if tls else {}
        self._ways |= listeners or {}
        self._users = users

    @property
    def url(self) -> str:
        """The URL of a destination."""
        return f"kafka://127.0.0.1:{self.port}"

    @property
    def servers(self) -> str:
        """The bootstrap servers of a client."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start, formatting the storage first if there is none; returns when the broker answers."""
        if not (self.folder / "data" / "meta.properties").exists():
            command = [*self._java("kafka.tools.StorageTool"), "format", "-t", self._cluster, "-c", self._properties()]
            for name, password in self._users.items():
                command += ["--add-scram", f'SCRAM-SHA-512=[name="{name}",password="{password}"]']
            run_to_end(command, account=None, cwd=self.folder)
        return super().start()

    def _command(self) -> Sequence[str | Path]:
        return [*self._java("kafka.Kafka"), self._properties()]

    def _java(self, main: str) -> list[str | Path]:
        heap = ["-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return ["java", *heap, "-cp", self._class_path, main]

    def _properties(self) -> Path:
        """Write the broker's settings. Our own let a killed broker come back in seconds."""
        near, controller = f"PLAINTEXT://127.0.0.1:{self.port}", f"CONTROLLER://127.0.0.1:{self._controller}"
        heard, told = ("".join(f",{name}://127.0.0.1:{ports[n]}" for name, ports in self._ways.items()) for n in (0, 1))
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller}",
            "listeners": f"{near},{controller}{heard}",
            "advertised.listeners": f"{near}{told}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,FAR:PLAINTEXT,SAFE:SASL_SSL",
            "log.dirs": str(self.folder / "data"),
            "num.partitions": "3",
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "broker.session.timeout.ms": "6000",
            "broker.heartbeat.interval.ms": "300",
            **(self._safety() if self._tls else {}),
            **self._settings,
        }
        path = self.folder / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        return path

    def _safety(self) -> Mapping[str, str]:
        """Return the settings of the port with TLS, whose key and certificate have to be in one file."""
        assert self._tls is not None
        keys = self.folder / "keys.pem"
        keys.write_text("".join(path.read_text() for path in self._tls))
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(keys),
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.safe.sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.safe.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
        }

    def _answers(self) -> bool:
        """Return whether the broker names itself: an open port is too early."""
        # Metadata, version 0: api key, version, correlation id, no client id, no topics asked for but all.
        request = struct.pack(">hhihi", 3, 0, 1, -1, 0)
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as client:
                client.sendall(struct.pack(">i", len(request)) + request)
                answer = client.recv(65_536)
        except OSError:
            return False
        return struct.pack(">i", self.port) in answer


def _kafka_class_path() -> str:
    """Return the class path of a Kafka broker."""
    logging = (f"org.apache.logging.log4j:{name}:{_LOG4J}" for name in ("log4j-core", "log4j-slf4j-impl"))
    return class_path("kafka", f"org.apache.kafka:kafka_2.13:{_KAFKA}", *logging)
