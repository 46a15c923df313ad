"""Streams of a Redis server for tests."""

import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from uuid import UUID

import redis

from outbox.model.message import Message
from outbox.senders.redis import RedisSender, read_message
from outbox.testing.sender_contract import Destination, Stored
from tests.support.remote import Place, stored_of
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.redis import RedisServer
from tests.support.servers.redis_cluster import RedisCluster, Watched
from tests.support.stand_ins import StandIn

#: A command with a message's id, as MONITOR tells it: the seconds since 1970, and the id.
_ARRIVAL = re.compile(rb'^\+?([0-9]+\.[0-9]+) [^\n]*?"Outbox-Id" "([0-9a-f-]{36})"', re.MULTILINE)


class Streams(Place):
    """The streams behind a prefix of their own, reached through a proxy."""

    sender = RedisSender

    def __init__(self, server: RedisServer, proxy: TcpProxy) -> None:
        super().__init__(proxy)
        self.server = server
        self.prefix = f"p{uuid.uuid4().hex[:12]}"
        self.url = f"redis://127.0.0.1:{proxy.port}/0/{self.prefix}"
        self.client = redis.Redis(port=server.port)
        self._listen([server])

    def _listen(self, servers: Sequence[RedisServer]) -> None:
        """Hear what the servers carry out, which may change their places."""
        self._servers = servers
        self._arrivals = [Arrivals(server) for server in servers]

    def entries(self, topic: str) -> list[Mapping[bytes, bytes]]:
        """The entries of one stream."""
        return [fields for name, fields in self._all_entries() if name == f"{self.prefix}:{topic}".encode()]

    def read(self) -> list[Message]:
        """What a consumer of an outbox reads, in the order of each stream."""
        return [read_message(name, fields, prefix=self.prefix) for name, fields in self._all_entries()]

    def raw(self) -> list[tuple[UUID, object]]:
        """The stream and the fields of every entry."""
        return [(UUID(fields[b"Outbox-Id"].decode()), (name, fields)) for name, fields in self._all_entries()]

    def stored(self) -> list[Stored]:
        """The same in the order of arrival, of which the streams themselves know nothing."""
        places = {found: moment for each in self._arrivals for found, moment in each.places().items()}
        found = sorted(self.read(), key=lambda message: places[str(message.message_id)])
        return [stored_of(message) for message in found]

    def check_stored(self, sent: Sequence[Message]) -> None:
        """After a crash of the server, which ends the listening, the streams themselves tell the order."""
        if all(each.hears for each in self._arrivals):
            return super().check_stored(sent)
        return self.check_streams(sent)

    def check_streams(self, sent: Sequence[Message]) -> None:
        """Require the same of the streams, where each key has one stream."""
        stored = [each.message_id for each in self.read()]
        assert set(stored) == {message.message_id for message in sent}
        for key in {message.key for message in sent} - {None}:
            of_key = dict.fromkeys(message.message_id for message in sent if message.key == key)
            assert [each for each in dict.fromkeys(stored) if each in of_key] == list(of_key)
        self.check_copies()

    def fail(self, topic: str) -> None:
        """Something else than a stream has its name."""
        self.client.set(f"{self.prefix}:{topic}", "no stream")

    def close(self) -> None:
        """Remove the streams."""
        for arrivals in self._arrivals:
            arrivals.close()
        for client in self._clients():
            for name in self._names(client):
                client.delete(name)

    def _all_entries(self) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
        """Each with the name of its stream."""
        return [
            (name, fields)
            for client in self._clients()
            for name in self._names(client)
            if client.type(name) == b"stream"
            for _, fields in cast("Any", client.xrange(name))
        ]

    def _clients(self) -> Iterator[redis.Redis]:
        """Reach each server without a proxy."""
        for server in self._servers:
            with redis.Redis(port=server.port) as client:
                yield client

    def _names(self, client: redis.Redis) -> Any:
        return client.keys(f"{self.prefix}:*")


class ClusterStreams(Streams):
    """The streams behind a prefix of their own in a cluster, each node of which is reached through its proxy."""

    def __init__(self, cluster: RedisCluster, *, tag: str = "") -> None:
        """`tag`: streams with the same text in braces are on one node."""
        Place.__init__(self, cast("TcpProxy", Together([node.proxy for node in cluster.nodes])))
        self.cluster = cluster
        self.prefix = f"p{uuid.uuid4().hex[:12]}{tag}"
        hosts = ",".join(f"127.0.0.1:{node.proxy.port}" for node in cluster.masters)
        self.url = f"redis+cluster://{hosts}/{self.prefix}"
        self.server = cluster.owner(f"{self.prefix}:alpha")
        self._listen(cluster.masters)

    def fail(self, topic: str) -> None:
        """Something else than a stream has its name."""
        name = f"{self.prefix}:{topic}"
        self.cluster.owner(name).run("SET", name, "no stream")

    def close(self) -> None:
        """Remove the streams, when the network is as it was."""
        self.recover()
        super().close()


class SentinelStreams(Streams):
    """The streams behind a prefix of their own, of a master that sentinels know."""

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.master, watched.proxy)
        self.url = f"redis+sentinel://{watched.hosts}/mymaster/0/{self.prefix}"

    def lose_next_answer(self) -> None:
        """It might be the answer to a sentinel."""
        Destination.lose_next_answer(self)

    def close(self) -> None:
        """Remove the streams, when the network is as it was."""
        self.recover()
        super().close()


class Together:
    """Proxies that are told the same."""

    def __init__(self, proxies: Sequence[TcpProxy]) -> None:
        self._proxies = proxies

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell_all(*arguments: Any) -> None:
            for proxy in self._proxies:
                getattr(proxy, name)(*arguments)

        return tell_all


class Arrivals:
    """Listens to the commands that a server carries out."""

    def __init__(self, server: RedisServer) -> None:
        self._heard = bytearray()
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._socket.sendall(b"MONITOR\r\n")
        assert self._socket.recv(5) == b"+OK\r\n"
        self._client = redis.Redis(port=server.port)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def hears(self) -> bool:
        """Whether the server that it listens to is alive."""
        return self._thread.is_alive()

    def places(self) -> dict[str, tuple[float, int]]:
        """When the first command with each message's id was carried out, and its number."""
        mark = uuid.uuid4().hex.encode()
        self._client.echo(mark)
        while mark not in self._heard[-4096:]:
            self._thread.join(0.01)
        found: dict[str, tuple[float, int]] = {}
        for number, each in enumerate(_ARRIVAL.finditer(bytes(self._heard))):
            found.setdefault(each[2].decode(), (float(each[1]), number))
        return found

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._client.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while data := self._socket.recv(1 << 20):
                self._heard += data


class NewerRedis(StandIn):
    """Stands in for a Redis 8.6, and keeps the commands that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[list[bytes]] = []
        self.url = f"redis://127.0.0.1:{self.port}"

    def serve(self, client: socket.socket) -> None:
        """Answer each command."""
        with client, suppress(OSError), client.makefile("rb") as lines:
            while header := lines.readline():
                command = [lines.read(int(lines.readline()[1:]) + 2)[:-2] for _ in range(int(header[1:]))]
                self.commands.append(command)
                self._say(client, command)

    def _say(self, client: socket.socket, command: list[bytes]) -> None:
        client.sendall(self._answer(command))

    def _answer(self, command: list[bytes]) -> bytes:
        if command[0] == b"INFO":
            return b"$26\r\nredis_version:8.6.0\r\nx:y\r\n\r\n"
        return {b"CONFIG": b"*0\r\n", b"EXEC": b"*0\r\n", b"XADD": b"+1-1\r\n"}.get(command[0], b"+OK\r\n")


class StrangeRedis(NewerRedis):
    """Answers every XADD in the same way."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self._always = answer

    def _answer(self, command: list[bytes]) -> bytes:
        return self._always if command[0] == b"XADD" else super()._answer(command)


class ArrivingRedis(NewerRedis):
    """A node that gets the slot of a stream behind the first command: it sends that one away, to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[bytes] = []
        self._has_slot = self._is_aborted = False
        self._queued: list[bytes] | None = None

    def _answer(self, command: list[bytes]) -> bytes:
        match command[0]:
            case b"MULTI":
                self._queued, self._is_aborted = [], False
            case b"EXEC":
                queued, self._queued = self._queued or [], None
                if self._is_aborted:
                    return b"-EXECABORT Transaction discarded because of previous errors.\r\n"
                self.stored += queued
                return b"*%d\r\n" % len(queued) + b"+1-1\r\n" * len(queued)
            case b"XADD" if not self._has_slot:
                self._has_slot = self._is_aborted = True
                return b"-MOVED 1 %b\r\n" % self.url.rpartition("/")[2].encode()
            case b"XADD":
                (self.stored if self._queued is None else self._queued).append(command[-1])
                return b"+1-1\r\n" if self._queued is None else b"+QUEUED\r\n"
        return super()._answer(command)


class SlowRedis(NewerRedis):
    """Answers one command, and those after it, a byte at a time."""

    def __init__(self, slow_from: bytes) -> None:
        super().__init__()
        self._slow_from = slow_from

    def _say(self, client: socket.socket, command: list[bytes]) -> None:
        seconds = 0.2 if any(each[0] == self._slow_from for each in self.commands) else 0
        for byte in self._answer(command):
            time.sleep(seconds)
            client.sendall(bytes([byte]))
