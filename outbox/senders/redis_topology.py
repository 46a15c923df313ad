"""The servers of a Redis: a single server, the master that sentinels know, or the nodes of a cluster.

The hash slot of a stream decides about the node of a cluster. The cluster itself tells: a node without the slot answers
MOVED and names the right node, and ASK while the slot is on its way to another node. So the sender needs no list of
slots, nor the right to read that list.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

from redis.exceptions import AskError, MovedError, RedisError

from outbox.senders.address import Address, host_and_port
from outbox.senders.connection_log import reason_of
from outbox.senders.redis_server import Connecting, Server, end_of_call

_Found = TypeVar("_Found")


class Topology:
    """Knows the server of each stream. `find`: returns the server for a stream of which nothing is known."""

    def __init__(self, connecting: Connecting, find: Callable[[Topology], Server], *, is_cluster: bool = False) -> None:
        self.is_cluster = is_cluster
        self._connecting = connecting
        self._find = find
        self._first: Server | None = None
        self._of_stream: dict[str, Server] = {}
        self._servers: dict[tuple[str, int], Server] = {}

    def server_of(self, stream: str) -> Server:
        """Return the server that takes a stream, as far as is known; raise `ConnectionError` if no server is found."""
        found = self._of_stream.get(stream) or self._first
        if found is None:
            found = self._first = self._find(self)
        return found

    def follow(self, redirect: AskError, stream: str, by: Server) -> Server:
        """Return the server to which a server has redirected a stream."""
        server = self.at(redirect.host or by.host, redirect.port)
        if isinstance(redirect, MovedError):  # ASK is for the moment
            self._of_stream[stream] = server
        return server

    def lose(self, server: Server) -> None:
        """Forget a server that has failed: another server may have taken over its streams, or its address."""
        server.leave()
        self._servers.pop((server.host, server.port), None)
        if self._first is server:
            self._first = None
        for stream in [stream for stream, each in list(self._of_stream.items()) if each is server]:
            self._of_stream.pop(stream, None)

    def at(self, host: str, port: int) -> Server:
        """Return the server of an address."""
        address = (host, port)
        if address not in self._servers:
            self._servers[address] = Server(host, port, self._connecting)
        return self._servers[address]

    def any_node(self, seeds: Collection[tuple[str, int]]) -> Server:
        """Return a node of the cluster: of the seeds, or of the nodes that other nodes have named."""
        return first_answer([self.at(*each) for each in {*seeds, *self._servers}], _node)

    def close(self) -> None:
        """Close the connections; those in use at the end of their calls."""
        for server in list(self._servers.values()):
            server.leave()


def topology_of(address: Address, kind: str, connecting: Connecting, *, master: str) -> Topology:
    """Return the servers of an address. `kind`: "cluster", "sentinel", or "" for a single server."""
    if kind == "cluster":
        seeds = [host_and_port(host, 6379) for host in address.hosts]
        return Topology(connecting, lambda topology: topology.any_node(seeds), is_cluster=True)
    if kind == "sentinel":
        user, password = (address.options.get(f"sentinel-{each}") for each in ("user", "password"))
        to_sentinel = replace(connecting, user=user, password=password, database=0)
        sentinels = [Server(*host_and_port(host, 26379), to_sentinel) for host in address.hosts]
        return Topology(
            connecting,
            lambda topology: topology.at(*first_answer(sentinels, lambda sentinel: _master(sentinel, master))),
        )
    single = address.only_host(6379)
    return Topology(connecting, lambda topology: topology.at(*single))


def first_answer(servers: Collection[Server], ask: Callable[[Server], _Found]) -> _Found:
    """Return the first answer, of servers asked in random order; raise `ConnectionError` if none answers in time."""
    errors, end = [], end_of_call.get()
    for asked, server in enumerate(random.sample(list(servers), len(servers))):
        now = time.monotonic()
        # Some time must be left for the servers that come later, and for the messages.
        share = end_of_call.set(now + (end - now) / (len(servers) - asked + 1))
        try:
            return ask(server)
        except (RedisError, OSError) as error:
            server.leave()
            errors.append(f"{server.where}: {reason_of(error)}")
        finally:
            end_of_call.reset(share)
    raise ConnectionError("; ".join(errors))


def _node(server: Server) -> Server:
    """Return a server that is a node of a cluster."""
    abilities = server.abilities or server.ask()
    if abilities.is_alone:
        raise ConnectionError("the server is in no cluster; leave +cluster out of the URL, and write one host")
    return server


def _master(sentinel: Server, name: str) -> tuple[str, int]:
    """Return the address of a master, as a sentinel knows it."""
    found: Any = sentinel.client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)  # type: ignore[no-untyped-call]
    sentinel.leave()  # the next question may come in a year
    if found is None:
        raise ConnectionError(f"the sentinel knows no master {name!r}")
    host, port = found
    return host.decode(), int(port)
