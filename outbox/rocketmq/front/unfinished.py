"""Unfinished requests: gRPC keeps their bytes in memory, and does not say how many.

The kernel says how much each connection has received, and the front knows how much of it has become requests; the rest
belongs to requests on their way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from outbox.runtime.clock import clock
from outbox.runtime.throttled_log import ThrottledLog

logger = logging.getLogger("outbox")

#: Bytes of a call besides its request: headers and frames of HTTP/2.
_OF_CALL = 2048
#: Seconds between two looks; many connections are looked at less often, so that looks take a twentieth of the time.
_PAUSE, _SHARE = 0.1, 20
#: Of the kernel's `sock_diag`: a dump by ports, and the place of the received bytes in the facts about a connection.
_SOCK_DIAG, _BY_FAMILY, _DUMP, _INFO, _ESTABLISHED = 4, 20, 0x301, 2, 1 << 1
_HEAD, _FACTS, _RECEIVED = 16, 88, 128
_ANY_SOCKET = 0xFFFF_FFFF
_ENDS = (2, 3)

#: The other end of a connection.
Peer = tuple[str, int]


@dataclass(eq=False, slots=True)
class _Connection:
    """A connection with the bytes that have become requests, and its calls that read."""

    peer: Peer
    known: int = 0
    reading: set[asyncio.Timeout] = field(default_factory=set)


class Unfinished:
    """Ends calls of the connection with the most bytes of unfinished requests, if all have too many; in one event loop.

    Works on Linux; elsewhere nothing is ended.
    """

    def __init__(self, most: int) -> None:
        """`most`: bytes of the unfinished requests of all connections."""
        self._most = most
        self._connections: dict[str, _Connection] = {}
        self._log = ThrottledLog(logger)

    @contextmanager
    def reading(self, peer: str, limit: asyncio.Timeout) -> Iterator[None]:
        """Read a request inside the block. `limit`: ends the reading when it is brought forward."""
        connection = self._of(peer)
        connection.reading.add(limit)
        try:
            yield
        finally:
            connection.reading.discard(limit)

    def began(self, peer: str) -> None:
        """Note a call."""
        self._of(peer).known += _OF_CALL

    def finished(self, peer: str, size: int) -> None:
        """Note a request of so many bytes, which is no more than the memory of its handler."""
        # TLS and frames add some.
        self._of(peer).known += size + size // 32

    async def run(self, ports: Collection[int]) -> None:
        """Look again and again, until cancelled. `ports`: at which the front listens."""
        while True:
            began = clock()
            with suppress(OSError, AttributeError):  # another system, or a kernel without the facts
                self.look(await asyncio.to_thread(received, ports))
            await asyncio.sleep(max(_PAUSE, _SHARE * (clock() - began)))

    def look(self, received: Mapping[Peer, int]) -> None:
        """End calls, if there are too many bytes. `received`: by connection."""
        self._connections = {
            name: each for name, each in self._connections.items() if each.peer in received or each.reading
        }
        unfinished = dict[_Connection, int]()
        for each in self._connections.values():
            all_of_it = received.get(each.peer, 0)
            # Calls take less than is assumed of them.
            each.known = min(each.known, all_of_it)
            unfinished[each] = all_of_it - each.known
        while sum(unfinished.values()) > self._most:
            worst = max(unfinished, key=lambda each: unfinished[each])
            worst.known += unfinished.pop(worst)
            for limit in worst.reading:
                limit.reschedule(asyncio.get_running_loop().time())
            text = "front: unfinished requests have more than %d bytes; those of %s are ended"
            self._log.warning(text, self._most, worst.peer[0])

    def _of(self, peer: str) -> _Connection:
        found = self._connections.get(peer)
        if found is None:
            found = self._connections[peer] = _Connection(_peer(peer))
        return found


def _peer(name: str) -> Peer:
    """Return the other end by gRPC's name, such as `ipv4:127.0.0.1:5000` and `ipv6:%5B::1%5D:5000`."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    try:
        return str(ip_address(host.strip("[]").partition("%")[0])), int(port)
    except ValueError:
        return name, 0


def received(ports: Collection[int]) -> dict[Peer, int]:
    """Return how many bytes each connection to a port of this machine has received.

    Raises:
        OSError: the kernel does not say.
        AttributeError: the system is not Linux.
    """
    found = dict[Peer, int]()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            for port in ports:
                of_port = struct.pack(">HH", port, 0) + bytes(32) + struct.pack("=III", 0, _ANY_SOCKET, _ANY_SOCKET)
                asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED) + of_port
                kernel.send(struct.pack("=IHHII", _HEAD + len(asked), _BY_FAMILY, _DUMP, 1, 0) + asked)
                while _added(found, kernel.recv(1 << 18)):
                    pass
    return found


def _added(found: dict[Peer, int], data: bytes) -> bool:
    """Add the connections of an answer; return False after the last answer."""
    at = 0
    while at < len(data):
        size, kind = struct.unpack_from("=IH", data, at)
        if kind in _ENDS:
            return False
        port, host = struct.unpack_from(">H", data, at + 22)[0], data[at + 40 : at + 56]
        address = ip_address(host[:4] if data[at + 16] == socket.AF_INET else host)
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        part = at + _FACTS
        while part < at + size:
            length, what = struct.unpack_from("=HH", data, part)
            if what == _INFO:
                found[str(mapped or address), port] = struct.unpack_from("=Q", data, part + 4 + _RECEIVED)[0]
            part += (length + 3) & ~3
        at += (size + 3) & ~3
    return True
