"""A private Redis Cluster, each node behind a proxy; and a private master with a replica, watched by sentinels."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

from redis import Redis
from redis.crc import key_slot

from outbox.testing.servers.local import NO_SETTINGS
from outbox.testing.servers.process import free_port
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.redis import RedisServer
from tests.support.waiting import eventually

_SLOTS = 16_384
#: No node is taken for dead by itself, however busy the machine is.
_PATIENT = "600000"


class Node(RedisServer):
    """A node of a cluster. It tells everybody the address of its proxy."""

    def __init__(self, proxy: TcpProxy, settings: Mapping[str, str]) -> None:
        self.proxy = proxy
        self.bus = free_port()
        self.id = secrets.token_hex(20)
        ours = {
            "cluster-enabled": "yes", "cluster-node-timeout": _PATIENT, "cluster-port": str(self.bus),
            "cluster-announce-ip": "127.0.0.1", "cluster-announce-port": str(proxy.port),
            "cluster-announce-bus-port": str(self.bus), "repl-diskless-sync-delay": "0",
        }  # fmt: skip
        super().__init__(settings=ours | dict(settings))

    def start(self) -> Self:
        """Start, and lead the proxy to it."""
        super().start()
        self.proxy.redirect(self.port)
        return self

    @property
    def is_ready(self) -> bool:
        """Whether it takes commands of its slots."""
        return bool(self.run("CLUSTER INFO")["cluster_state"] == "ok")

    def client(self) -> Redis:
        """A client without a proxy."""
        return Redis(port=self.port, decode_responses=True)

    def run(self, *command: Any) -> Any:
        """Run a command."""
        with self.client() as client:
            return client.execute_command(*command)  # type: ignore[no-untyped-call]


class RedisCluster:
    """Three masters, and a replica of the first, which is not started."""

    def __init__(self, *, settings: Mapping[str, str] = NO_SETTINGS) -> None:
        self._settings = settings
        self._stack = ExitStack()
        self.masters: list[Node] = []
        self.replica: Node

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            nodes = [Node(stack.enter_context(TcpProxy("127.0.0.1", 0)), self._settings) for _ in range(4)]
            *self.masters, self.replica = nodes
            self._acquaint()
            for node in nodes:
                stack.callback(node.close)
            for node in self.masters:
                node.start()
            assert eventually(lambda: all(node.is_ready for node in self.masters))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def nodes(self) -> list[Node]:
        """All of them."""
        return [*self.masters, self.replica]

    def owner(self, stream: str) -> Node:
        """The node that has the slot of a stream, as far as the first node knows."""
        port = next(
            served[2][1]
            for served in self.masters[0].run("CLUSTER SLOTS")
            if served[0] <= key_slot(stream.encode()) <= served[1]
        )
        return next(node for node in self.nodes if node.proxy.port == port)

    def _acquaint(self) -> None:
        """Write for each node what it would have learnt in the cluster."""
        for node in self.nodes:
            lines = [self._line(each, number, node) for number, each in enumerate(self.nodes)]
            (node.folder / "nodes.conf").write_text("\n".join([*lines, "vars currentEpoch 4 lastVoteEpoch 0", ""]))

    def _line(self, node: Node, number: int, reader: Node) -> str:
        myself = "myself," if node is reader else ""
        place = f"{node.id} 127.0.0.1:{node.proxy.port}@{node.bus}"
        if node is self.replica:
            return f"{place} {myself}slave {self.masters[0].id} 0 0 1 connected"
        slots = f"{_SLOTS * number // 3}-{_SLOTS * (number + 1) // 3 - 1}"
        return f"{place} {myself}master - 0 0 {number + 1} connected {slots}"
