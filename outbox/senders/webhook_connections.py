"""Connections to webhooks on which an answer that nobody asked for is not taken for that to the next request.

Such an answer comes from an endpoint that answers twice, or that tells an idle client that its time is over. The
driver's pool closes an idle connection on which there is something to read. It sees only what is in the socket; here it
sees the rest, too. An answer that arrives only after the next request was sent cannot be told from that request's own.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any

from httpcore2 import AsyncConnectionPool, AsyncNetworkBackend, AsyncNetworkStream, ConnectError

#: How every answer begins.
_BEGINNING = b"HTTP/"


def watch(pool: AsyncConnectionPool) -> None:
    """Have a pool make such connections from now on."""
    pool._network_backend = _Network(pool._network_backend)


class _Network(AsyncNetworkBackend):
    """Opens connections."""

    def __init__(self, inner: AsyncNetworkBackend) -> None:
        self._inner = inner

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> AsyncNetworkStream:
        return _Stream(await self._inner.connect_tcp(host, port, timeout, local_address, socket_options))

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class _Stream(AsyncNetworkStream):
    """One connection. It gives the driver one answer at a time, and keeps back what follows."""

    def __init__(self, inner: AsyncNetworkStream) -> None:
        self._inner = inner
        self._kept_back = b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._kept_back or await self._inner.read(max_bytes, timeout)
        end = _end_of_answer(data)
        self._kept_back = data[end:]
        return data[:end]

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> AsyncNetworkStream:
        if self._kept_back:
            raise ConnectError("the proxy said more than it was asked for")
        return _Stream(await self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        """Return what the driver asks for; its pool asks for `is_readable` before it uses a connection again."""
        found = self._inner.get_extra_info(info)
        return (bool(self._kept_back) or found or self._holds_more()) if info == "is_readable" else found

    def _holds_more(self) -> bool:
        """Return whether TLS holds something that has left the socket already."""
        tls = self._inner.get_extra_info("ssl_object")
        if tls is None:
            return False
        try:
            tls.read(1)  # the connection is not used again if there is anything
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError:
            pass
        return True


def _end_of_answer(data: bytes) -> int:
    """Return where another answer may begin behind the first byte, at the latest at the end.

    A body that contains the same text is only read in two parts.
    """
    found = data.find(_BEGINNING, 1)
    if found >= 0:
        return found
    for length in range(len(_BEGINNING) - 1, 0, -1):
        if len(data) > length and data.endswith(_BEGINNING[:length]):
            return len(data) - length
    return len(data)
