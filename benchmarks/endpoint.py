"""A web server that takes every webhook, in a process of its own; it does little, so that clients can be measured."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe

from benchmarks.site import PROCESSES

_PATIENCE = 30.0
_TAKEN = b"HTTP/1.1 204 No Content\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


@contextmanager
def endpoint() -> Iterator[str]:
    """Run the server while the block runs; yield its URL."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(_PATIENCE):
            raise RuntimeError("the endpoint does not start")
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _serve(pipe: Pipe) -> None:
    asyncio.run(_listen(pipe))


async def _listen(pipe: Pipe) -> None:
    server = await asyncio.get_running_loop().create_server(_Requests, "127.0.0.1", 0, backlog=512)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


class _Requests(asyncio.Protocol):
    """Answers each request of a connection when all of it is here."""

    def __init__(self) -> None:
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while (end := self._unread.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._unread, 0, end + 2)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._unread) < whole:
                return
            self._unread = self._unread[whole:]
            self._transport.write(_TAKEN)
