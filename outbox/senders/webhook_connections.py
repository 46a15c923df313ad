"""Connections to webhooks on which a surplus answer is not taken for the answer to the next request.

An endpoint that answers twice sends such an answer, and so does an endpoint that tells an idle client of a time-out.
The driver's pool closes an idle connection with anything to read in the socket; the rest is found here. A surplus
answer that arrives after the next request was sent looks like the answer to that request, and shifts all later answers
of the connection. So a connection carries a limited number of requests.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from httpcore2 import AnyIOBackend, AsyncNetworkBackend, AsyncNetworkStream, ConnectError

#: How every answer begins, and how its head ends.
_BEGINNING, _END_OF_HEAD = b"HTTP/", b"\r\n\r\n"
#: What has arrived is read at once; only a part of a record of TLS makes this wait.
_LAST_LOOK_SECONDS = 0.02
_LAST_LOOK_BYTES = 65_536
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*\r\n", re.IGNORECASE)


class Network(AsyncNetworkBackend):
    """Opens connections. `requests`: the most requests of one connection."""

    def __init__(self, requests: int, tell: Callable[[], object]) -> None:
        self._inner = AnyIOBackend()
        self._requests = requests
        self._tell = tell

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> AsyncNetworkStream:
        """Connect."""
        return Stream(
            await self._inner.connect_tcp(host, port, timeout, local_address, socket_options),
            self._requests,
            self._tell,
        )

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await self._inner.sleep(seconds)


class Stream(AsyncNetworkStream):
    """One connection. The driver gets one answer at a time; further bytes are kept back, and end the connection."""

    def __init__(self, inner: AsyncNetworkStream, requests: int, tell: Callable[[], object]) -> None:
        self._inner = inner
        self._requests = self._left = requests
        self._tell = tell
        self._kept_back = b""
        #: The head of the answer so far, and the bytes left of the body; None: no end is known.
        self._head = b""
        self._body: int | None = None
        self._is_busy = False
        #: An answer was found that nobody asked for, so that any answer of this connection may be that to another.
        self.has_surplus = False

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return no more than the rest of one answer."""
        data = self._kept_back or await self._inner.read(max_bytes, timeout)
        if self._body is not None:
            end = min(self._body, len(data))
            self._body -= end
        else:
            end = _end_of_answer(data)
            self._head += data[:end]
            if (found := self._head.find(_END_OF_HEAD)) >= 0:
                end -= len(self._head) - found - len(_END_OF_HEAD)
                length = _LENGTH.search(self._head, 0, found + 2)
                self._head, self._body = b"", int(length[1]) if length else None
        self._kept_back = data[end:]
        return data[:end]

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write a part of a request; the first part begins the request."""
        if not self._is_busy:
            self._is_busy = True
            self._left -= 1
            self._head, self._body = b"", None
        await self._inner.write(buffer, timeout)

    def answered(self) -> None:
        """Note that the answer to the last request has been read to the end."""
        self._is_busy = False

    async def look(self) -> None:
        """Look for bytes behind the last answer. A connection with any is not used again."""
        if self._is_busy:
            return
        if self._holds_more():
            self._left = 0
        found, self._kept_back = self._kept_back, b""
        is_readable = self._inner.get_extra_info("is_readable")
        if found or is_readable:
            self._left = 0
        if is_readable:
            with suppress(Exception):  # the connection is at its end
                found += await self._inner.read(_LAST_LOOK_BYTES, _LAST_LOOK_SECONDS)
        if (answer := found.lstrip()) and answer[: len(_BEGINNING)] == _BEGINNING[: len(answer)]:
            self.has_surplus = True
            self._tell()

    async def aclose(self) -> None:
        """Look for the last time, and close the connection."""
        await self.look()
        await self._inner.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> AsyncNetworkStream:
        """Return the connection with TLS."""
        if self._kept_back:
            raise ConnectError("the proxy said more than was asked")
        return Stream(await self._inner.start_tls(ssl_context, server_hostname, timeout), self._requests, self._tell)

    def get_extra_info(self, info: str) -> Any:
        """Return facts for the driver; the pool does not use a connection again that `is_readable` while idle."""
        found = self._inner.get_extra_info(info)
        if info != "is_readable":
            return found
        return self._left <= 0 or bool(self._kept_back) or found or self._holds_more()

    def _holds_more(self) -> bool:
        """Return whether TLS holds bytes that have left the socket."""
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

    A body that looks like an answer is only read in two parts.
    """
    head, _, rest = data.partition(_END_OF_HEAD)
    found = data.find(_BEGINNING, 1)
    if rest:
        end = len(head) + len(_END_OF_HEAD)
        return min(end, found) if found > 0 else end
    if found > 0:
        return found
    for length in range(len(_BEGINNING) - 1, 0, -1):
        if len(data) > length and data.endswith(_BEGINNING[:length]):
            return len(data) - length
    return len(data)
