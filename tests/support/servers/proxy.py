"""A network that fails on demand: a TCP proxy between a client and a server.

    with TcpProxy("127.0.0.1", 5432) as proxy:
        engine = create_engine(f"postgresql+psycopg://postgres@127.0.0.1:{proxy.port}/shop")
        ...                         # all is well
        proxy.refuse()              # the server is down
        proxy.pass_through()        # and back

A client sees in each mode what it sees in production. `refuse` is a stopped server, `black_hole` a network that drops
packets, `cut_after` an answer that was lost on its way.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Literal, Self

from outbox.testing.servers.process import free_port

Direction = Literal["to_server", "to_client"]

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER for no time at all


class TcpProxy:
    """Passes everything through to the target until told otherwise; each mode applies to open connections, too.

    It runs in a thread of its own, so that code that blocks can be tested: `with TcpProxy("127.0.0.1", 5432) as proxy`.
    Every method returns when its mode is in force. What the server says arrives `latency` seconds later.
    """

    def __init__(self, target_host: str, target_port: int, *, latency: float = 0.0) -> None:
        self.port = free_port()
        self._target = (target_host, target_port)
        self._latency = latency
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outbox-proxy", daemon=True)
        self._listener: socket.socket | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._answering = asyncio.Event()
        self._answering.set()
        self._cut: tuple[Direction, int] | None = None
        self._clients: dict[asyncio.Task[None], socket.socket] = {}
        #: True when a black hole has swallowed something.
        self.swallowed = False

    def __enter__(self) -> Self:
        self._thread.start()
        self.pass_through()
        return self

    def __exit__(self, *exception: object) -> None:
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def pass_through(self) -> None:
        """Let everything pass again, what was held back included."""
        self._do(self._pass_through())

    def refuse(self) -> None:
        """Act as a stopped server: new connections are refused, open ones are reset."""
        self._do(self._refuse())

    def black_hole(self) -> None:
        """Act as a network that drops everything: connections are accepted, no byte passes in either direction."""
        self._do(self._black_hole())

    def hold_answers(self) -> None:
        """Let requests pass, and hold back what the server answers, until `pass_through`."""
        self._do(self._hold_answers())

    def silence_open(self) -> None:
        """Act as a server that has forgotten its open connections: they stay open, and none is answered ever again."""
        self._do(self._silence_open())

    def redirect(self, port: int) -> None:
        """Lead new connections to another port, as an address that moves to another server; open ones stay."""
        self._do(self._redirect(port))

    def cut_after(self, n_bytes: int, direction: Direction) -> None:
        """Let `n_bytes` more pass in `direction`, then reset the connection that would send the next one.

        It happens once: the answer to a COMMIT is lost, and the client that connects again is served.
        """
        self._do(self._cut_after(n_bytes, direction))

    def reset_all(self) -> None:
        """Reset every open connection; new ones are treated as before."""
        self._do(self._reset_all())

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _redirect(self, port: int) -> None:
        self._target = (self._target[0], port)

    async def _pass_through(self) -> None:
        self._cut = None
        self._flowing.set()
        self._answering.set()
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept, self._listener)

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await self._reset_all()

    async def _black_hole(self) -> None:
        self._flowing.clear()

    async def _hold_answers(self) -> None:
        self._answering.clear()

    async def _silence_open(self) -> None:
        self._answering.clear()
        self._answering = asyncio.Event()
        self._answering.set()

    async def _cut_after(self, n_bytes: int, direction: Direction) -> None:
        self._cut = (direction, n_bytes)

    async def _reset_all(self) -> None:
        connections = dict(self._clients)
        for task, client in connections.items():
            _reset_on_close(client)
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:  # its client has gone again
            return
        _prepare(client)
        task = self._loop.create_task(self._serve(client))
        self._clients[task] = client
        task.add_done_callback(lambda done: self._clients.pop(done).close())

    async def _serve(self, client: socket.socket) -> None:
        answering = self._answering
        with socket.socket() as server:
            _prepare(server)
            try:
                await self._flowing.wait()
                await self._loop.sock_connect(server, self._target)
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(client, server, "to_server", answering))
                    pumps.create_task(self._pump(server, client, "to_client", answering))
            except* OSError:
                _reset_on_close(client)

    async def _pump(
        self, source: socket.socket, sink: socket.socket, direction: Direction, answering: asyncio.Event
    ) -> None:
        while data := await self._loop.sock_recv(source, 65_536):
            self.swallowed |= not self._flowing.is_set()
            await self._flowing.wait()
            if direction == "to_client":
                await asyncio.sleep(self._latency)
                await answering.wait()
            allowed = self._allowance(direction, len(data))
            await self._loop.sock_sendall(sink, data[:allowed])
            if allowed < len(data):
                raise ConnectionResetError("cut")
        sink.shutdown(socket.SHUT_WR)

    def _allowance(self, direction: Direction, wanted: int) -> int:
        """Return how many of `wanted` bytes may pass."""
        if self._cut is None or self._cut[0] != direction:
            return wanted
        left = self._cut[1]
        self._cut = (direction, left - wanted) if wanted <= left else None
        return min(wanted, left)


def _prepare(connection: socket.socket) -> None:
    """Set a socket up for asyncio, and to pass small packets at once, so that the proxy adds no delay of its own."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _reset_on_close(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
