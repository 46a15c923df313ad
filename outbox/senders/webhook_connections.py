"""Connections to webhooks on which an answer that nobody asked for is not taken for that to the next request.

Such an answer comes from an endpoint that answers twice, or that tells an idle client that its time is over. The
driver's pool closes an idle connection on which there is something to read. It sees only what is in the socket; here it
sees the rest, too. An answer that arrives only after the next request was sent cannot be told from that request's own,
and shifts all later ones of its connection. So a connection carries a limited number of requests.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

from httpcore2 import (
    AsyncConnectionInterface,
    AsyncConnectionPool,
    AsyncNetworkBackend,
    AsyncNetworkStream,
    ConnectError,
    Origin,
    Request,
    Response,
)

from outbox.senders.connection_log import ConnectionLog

#: How every answer begins.
_BEGINNING = b"HTTP/"
#: The extension of a response that holds its connection.
_CONNECTION = "outbox.connection"
#: What has arrived is read at once; only a part of a record of TLS makes this wait.
_LAST_LOOK_SECONDS = 0.02
_LAST_LOOK_BYTES = 65_536


def watch(pool: AsyncConnectionPool, *, requests: int, log: ConnectionLog, surplus: str) -> None:
    """Have a pool make such connections from now on.

    `requests`: how many of them one connection carries. `surplus`: what the log is told of an answer too many.
    """
    create = pool.create_connection

    def create_watched(origin: Origin) -> AsyncConnectionInterface:
        watched = Connection(create(origin), requests=requests, log=log, surplus=surplus)
        return cast("AsyncConnectionInterface", watched)

    pool._network_backend = _Network(pool._network_backend)
    pool.create_connection = create_watched  # type: ignore[method-assign]  # the driver has no other way


def connection_of(extensions: Mapping[str, Any]) -> Connection:
    """Return the connection of a response with these extensions."""
    connection: Connection = extensions[_CONNECTION]
    return connection


class Connection:
    """A connection of the pool. It ends with anything that is left behind an answer, and after so many requests."""

    def __init__(self, inner: AsyncConnectionInterface, *, requests: int, log: ConnectionLog, surplus: str) -> None:
        self._inner = inner
        self._left = requests
        self._log = log
        self._surplus = surplus
        #: An answer was found that nobody asked for, so that any answer of this connection may be that to another.
        self.has_surplus = False

    async def handle_async_request(self, request: Request) -> Response:
        """Send a request, and return its answer with this connection in it."""
        self._left -= 1
        response = await self._inner.handle_async_request(request)
        response.extensions[_CONNECTION] = self
        return response

    async def look(self) -> None:
        """Look at what has come behind the last answer. A connection with anything there is not used again."""
        driver = self._idle_driver()
        if driver is None:
            return
        found: bytes = driver._h11_state.trailing_data[0]
        if driver._network_stream.get_extra_info("is_readable"):
            self._left = 0
            found += await driver._network_stream.rest()
        if (answer := found.lstrip()) and answer[: len(_BEGINNING)] == _BEGINNING[: len(answer)]:
            self.has_surplus = True
            self._log.lost(self._surplus)

    async def aclose(self) -> None:
        """Look for the last time, and close it."""
        await self.look()
        await self._inner.aclose()

    def has_expired(self) -> bool:
        """Return whether the connection is not to be used again. The pool asks before each request."""
        if self._inner.has_expired():
            return True
        driver = self._idle_driver()
        return driver is not None and (self._left <= 0 or bool(driver._h11_state.trailing_data[0]))

    def __getattr__(self, name: str) -> Any:
        """Return everything else that the pool asks for as the driver has it."""
        return getattr(self._inner, name)

    def _idle_driver(self) -> Any:
        """Return the part that speaks HTTP, when no request is under way; None before there is one, or meanwhile."""
        driver: Any = self._inner
        while driver is not None and not hasattr(driver, "_h11_state"):
            driver = getattr(driver, "_connection", None)  # there is a way through a proxy, or to a host
        return driver if driver is not None and driver.is_idle() else None


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

    async def rest(self) -> bytes:
        """Return what has come and was not read. Nothing may be read after that."""
        rest, self._kept_back = self._kept_back, b""
        if self._inner.get_extra_info("is_readable"):
            with suppress(Exception):  # the connection is at its end
                rest += await self._inner.read(_LAST_LOOK_BYTES, _LAST_LOOK_SECONDS)
        return rest

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
            self._kept_back += tls.read(_LAST_LOOK_BYTES)  # the connection is not used again if there is anything
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
