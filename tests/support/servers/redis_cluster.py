"""A private Redis Cluster, each node behind a proxy; and a private master with a replica, watched by sentinels."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

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
        self.safe_port = free_port() if "tls-cluster" in settings else None
        self.bus = free_port()
        self.id = secrets.token_hex(20)
        ours = {
            "cluster-enabled": "yes", "cluster-node-timeout": _PATIENT, "cluster-port": str(self.bus),
            "cluster-announce-ip": "127.0.0.1", "cluster-announce-port": str(proxy.port),
            "cluster-announce-bus-port": str(self.bus), "repl-diskless-sync-delay": "0",
        }  # fmt: skip
        if self.safe_port is not None:
            ours |= {"tls-port": str(self.safe_port), "cluster-announce-tls-port": str(proxy.port)}
        super().__init__(settings=ours | dict(settings))

    def start(self) -> Self:
        """Start, and lead the proxy to it."""
        super().start()
        self.proxy.redirect(self.served_port)
        return self

    @property
    def served_port(self) -> int:
        """The port behind the proxy: the one with TLS, if there is one."""
        return self.safe_port or self.port

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
            return client.execute_command(*command)


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
    def master(self) -> Node:
        """The node that has a replica."""
        return self.masters[0]

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

    def move(self, stream: str) -> None:
        """Move the slot of a stream to another master, as `redis-cli --cluster reshard` does."""
        slot, source = key_slot(stream.encode()), self.owner(stream)
        target = self.begin_move(stream)
        while keys := source.run("CLUSTER GETKEYSINSLOT", slot, 100):
            source.run("MIGRATE", "127.0.0.1", target.served_port, "", 0, 60_000, "KEYS", *keys)
        self.end_move(stream, target)

    def begin_move(self, stream: str) -> Node:
        """Let a slot be on its way: what is not there yet, the source leaves to the target. Return the target."""
        slot, source = key_slot(stream.encode()), self.owner(stream)
        target = next(node for node in self.masters if node is not source)
        target.run("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
        source.run("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
        return target

    def end_move(self, stream: str, target: Node) -> None:
        """Give the slot to the target."""
        for node in (target, *self.masters):
            node.run("CLUSTER SETSLOT", key_slot(stream.encode()), "NODE", target.id)

    def fail_over(self) -> None:
        """Kill the first master, and have its replica take over; the former master comes back as the replica."""
        self.masters[0].kill()
        self.replica.run("CLUSTER FAILOVER", "TAKEOVER")
        self.masters[0], self.replica = self.replica, self.masters[0]
        self.replica.start()

    def begin_replica(self) -> None:
        """Start the replica, and wait until it has what its master has."""
        self.replica.start()
        assert eventually(lambda: self.replica.run("INFO", "replication").get("master_link_status") == "up")

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


class Watched:
    """A master with a replica, and three sentinels that know the master as `mymaster`, by the address of its proxy."""

    def __init__(self, *, password: str | None = None) -> None:
        self._stack = ExitStack()
        login = {} if password is None else {"requirepass": password, "masterauth": password}
        self._settings = {"repl-diskless-sync-delay": "0", **login}
        self._password = password
        self.master: RedisServer
        self.replica: RedisServer
        self.proxy: TcpProxy
        self.sentinels: list[Sentinel] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.proxy = stack.enter_context(TcpProxy("127.0.0.1", 0))
            # Under another address it would be a second replica for the sentinels, once it is one.
            ours = {"replica-announce-ip": "127.0.0.1", "replica-announce-port": str(self.proxy.port)}
            self.master = stack.enter_context(RedisServer(settings=self._settings | ours))
            self.proxy.redirect(self.master.port)
            replica = {"replicaof": f"127.0.0.1 {self.master.port}"}
            self.replica = stack.enter_context(RedisServer(settings=self._settings | replica))
            self.begin_replica()
            self.sentinels = [stack.enter_context(Sentinel(self.proxy.port, self._password)) for _ in range(3)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def hosts(self) -> str:
        """The sentinels, as in a URL."""
        return ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)

    def fail_over(self) -> None:
        """Have the replica become the master, as a sentinel decides; the other sentinels hear of it."""
        first = self.sentinels[0]
        assert eventually(lambda: first.say("SENTINEL", "FAILOVER", "mymaster") == b"OK")
        assert eventually(lambda: self._about(self.replica)["role"] == "master")
        self.master, self.replica = self.replica, self.master

    def begin_replica(self) -> None:
        """Start the replica, a former master, too; wait until it has what its master has."""
        self.replica.start()
        with self._client(self.replica) as client:
            client.replicaof("127.0.0.1", self.master.port)
        assert eventually(lambda: self._about(self.replica)["master_link_status"] == "up")

    def _client(self, server: RedisServer) -> Redis:
        return Redis(port=server.port, password=self._password)

    def _about(self, server: RedisServer) -> Any:
        with self._client(server) as client:
            return client.info("replication")


class Sentinel(RedisServer):
    """One that leaves every decision to the test. `password`: of the servers, and its own."""

    def __init__(self, master: int, password: str | None) -> None:
        super().__init__()
        self._master = master
        self._password = password

    def say(self, *command: str) -> Any:
        """Run a command; return the answer, or None in place of an error."""
        with Redis(port=self.port, password=self._password) as client, suppress(RedisError):
            return client.execute_command(*command)
        return None

    def _answers(self) -> bool:
        assert self._program is not None
        about = self.say("INFO", "server")
        return about is not None and about["process_id"] == self._program.pid

    def _command(self) -> Sequence[str | Path]:
        lines = [
            f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}",
            f"sentinel monitor mymaster 127.0.0.1 {self._master} 2",
            f"sentinel down-after-milliseconds mymaster {_PATIENT}",
        ]  # fmt: skip
        if self._password is not None:
            lines += [f"sentinel auth-pass mymaster {self._password}", f"requirepass {self._password}"]
        (settings := self.folder / "sentinel.conf").write_text("\n".join([*lines, ""]))
        return [self._redis, settings, "--sentinel"]
