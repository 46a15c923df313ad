"""A private RocketMQ, which Maven fetches."""

from __future__ import annotations

import json
import shlex
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from outbox.testing.servers.local import LocalServer
from outbox.testing.servers.process import free_port
from tests.support.servers.maven import class_path

_ROCKETMQ = "5.5.0"
#: The dependency of RocketMQ names a range of versions, for which Maven would ask another repository, too.
_GRPC = "io.grpc:grpc-core:1.53.0"
#: For a Java machine that ends before a good compiler has paid for itself.
_SHORT = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_CLUSTER = "DefaultCluster"
#: Producers are asked about an open transaction after four to seven seconds, and each three seconds from then on.
_SOON = {"transactionTimeOut": 4000, "transactionCheckInterval": 3000, "transactionOpBatchInterval": 100}


class RocketServer(LocalServer):
    """A RocketMQ of this process alone: a name server, a broker, and a proxy that speaks gRPC at `port`.

    `topics` are types by name, `groups` settings of consumer groups by name, `settings` those of the broker, and `java`
    options of the Java machines. The proxy listens on all interfaces, because RocketMQ has no setting for this.
    """

    #: RocketMQ takes 12 seconds to end in an orderly way.
    _stop_signals = ()

    def __init__(
        self,
        *,
        topics: Mapping[str, str],
        groups: Mapping[str, Mapping[str, Any]],
        settings: Mapping[str, Any] = _SOON,
        java: Sequence[str] = _SHORT,
        directory: Path | None = None,
    ) -> None:
        artifacts = (f"org.apache.rocketmq:rocketmq-{name}:{_ROCKETMQ}" for name in ("proxy", "namesrv"))
        self._class_path = class_path("rocketmq", *artifacts, _GRPC)
        super().__init__("rocketmq", directory, None)
        self._names, self._broker, self._replicas, self._remoting = (free_port() for _ in range(4))
        self._topics, self._groups, self._settings, self._options = topics, groups, settings, java

    @property
    def place(self) -> str:
        """The place for clients."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start, with the topics and groups in place if there is no data; returns when clients are served."""
        config = self.folder / "store" / "config"
        if not config.exists():
            config.mkdir(parents=True)
            self._write(
                config / "topics.json", {"topicConfigTable": {name: self._topic(name) for name in self._topics}}
            )
            groups = {name: {"groupName": name, **settings} for name, settings in self._groups.items()}
            self._write(config / "subscriptionGroup.json", {"subscriptionGroupTable": groups})
        return super().start()

    def _topic(self, name: str) -> dict[str, Any]:
        queues = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
        return {"topicName": name, "attributes": {"message.type": self._topics[name]}, **queues}

    def _command(self) -> Sequence[str | Path]:
        names = f"127.0.0.1:{self._names}"
        proxy = {
            "rocketMQClusterName": _CLUSTER,
            "localServeAddr": "127.0.0.1",
            "grpcServerPort": self.port,
            "remotingListenPort": self._remoting,
            "grpcClientConsumerMinLongPollingTimeoutMillis": 1000,
        }
        broker = {
            "brokerClusterName": _CLUSTER,
            "brokerName": "broker",
            "brokerIP1": "127.0.0.1",
            "bindAddress": "127.0.0.1",
            "listenPort": self._broker,
            "haListenPort": self._replicas,
            "storePathRootDir": self.folder / "store",
            "mappedFileSizeCommitLog": 16 * 1024 * 1024,
            "diskMaxUsedSpaceRatio": 95,
            "autoCreateTopicEnable": "false",
            "enablePropertyFilter": "true",
            **self._settings,
        }
        self._write(self.folder / "proxy.json", proxy)
        self._write_lines("broker.conf", broker)
        self._write_lines("names.conf", {"listenPort": self._names, "bindAddress": "127.0.0.1"})
        first = self._java("namesrv.NamesrvStartup", "64m", "-c", "names.conf")
        then = self._java(
            "proxy.ProxyStartup", "512m", "-pm", "local", "-n", names, "-bc", "broker.conf", "-pc", "proxy.json"
        )
        # A broker that comes before the name server is known to it only ten seconds later.
        wait = f"until (: < /dev/tcp/127.0.0.1/{self._names}) 2> /dev/null; do sleep 0.1; done"
        return ["env", f"ROCKETMQ_HOME={self.folder}", "bash", "-c", f"{first} & {wait}; exec {then}"]

    def _java(self, main: str, heap: str, *arguments: str) -> str:
        """Return a command line. RocketMQ writes its log below the home folder."""
        properties = ["-Dtls.server.mode=disabled", f"-Duser.home={self.folder}", f"-Xmx{heap}"]
        program = f"org.apache.rocketmq.{main}"
        return shlex.join(["java", *self._options, *properties, "-cp", self._class_path, program, *arguments])

    def _write(self, path: Path, content: Mapping[str, Any]) -> None:
        path.write_text(json.dumps(content))

    def _write_lines(self, name: str, settings: Mapping[str, Any]) -> None:
        (self.folder / name).write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def _answers(self) -> bool:
        """Return whether the proxy listens, and the name server knows the broker."""
        request = json.dumps({"code": 105, "opaque": 1, "extFields": {"topic": _CLUSTER}}).encode()
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5):
                pass
            with socket.create_connection(("127.0.0.1", self._names), timeout=5) as client:
                client.sendall(struct.pack(">ii", 4 + len(request), len(request)) + request)
                answer = client.recv(65_536)
        except OSError:
            return False
        return b'"code":0' in answer
