"""A connection to RabbitMQ: it is opened, cut off, and closed within the time that a call has."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, SupportsIndex

import pamqp.frame
from aiormq import Channel as DriverChannel
from aiormq import Connection as DriverConnection
from aiormq import TransportFactory
from pamqp import commands
from yarl import URL

from outbox.senders.address import Address
from outbox.senders.rabbitmq_channel import Call, Channel
from outbox.senders.rabbitmq_refusals import words_of

#: Bytes of a frame for a server that has no limit.
_FRAME_MAX = 128 * 1024
#: Seconds between two heartbeats; a connection without any for three times as long counts as lost.
_HEARTBEAT = 10


@dataclass(frozen=True, slots=True)
class Target:
    """Where messages go, as the URL says."""

    address: Address
    vhost: str
    exchange: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, address: Address) -> Target:
        """Return what an address says, or refuse it."""
        vhost, *more = address.path or ("/",)
        if more:
            address.refuse("the path is one virtual host; write %2F for a slash in its name")
        exchange = address.options.get("exchange", "")
        try:
            commands.Connection.Open(vhost)
            commands.Basic.Publish(exchange=exchange)
        except ValueError:
            limit = "at most 127 characters; an exchange of letters, digits, blanks and -_.:@#,/+"
            address.refuse(f"the driver takes names of {limit}")
        ca = address.ca("amqps")
        tls = ssl.create_default_context(cafile=ca) if address.scheme == "amqps" else None
        return cls(address, vhost, exchange, tls)

    def without_user(self, said: str) -> str:
        """Return what the server said, without the name of the user."""
        return said.replace(f"user '{self.address.user or 'guest'}'", "the user")


class Connection:
    """One connection to one server. Once it fails or does not answer, it is closed and never used again."""

    def __init__(self, target: Target, server: str) -> None:
        self._target = target
        self._server = server
        self._driver: DriverConnection | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._idle: list[Channel] = []
        self._calls = 0
        self._is_closed = False

    @property
    def is_lost(self) -> bool:
        """Whether a new connection is needed."""
        return self._is_closed or self._driver is None or self._driver.is_closed

    async def open(self, host: str, port: int, deadline: float) -> None:
        """Connect and log in.

        Raises:
            TimeoutError: there is no answer before the deadline.
            Exception: there is another one than that of a server that lets us in.
        """
        address, loop = self._target.address, asyncio.get_running_loop()
        streams = _Streams(loop)
        async with asyncio.timeout_at(deadline):
            self._transport = await streams.open(host, port, self._target.tls)
        query = {"heartbeat": str(_HEARTBEAT)}
        url = URL.build(
            scheme=address.scheme, host=host, port=port, user=address.user, password=address.password, query=query
        )
        self._driver = DriverConnection(url, transport_factory=streams)
        self._driver.vhost = self._target.vhost
        # A driver that is cancelled waits for the server once more; one that is cut off ends at once.
        overdue = loop.call_at(deadline, self._transport.abort)
        try:
            await self._driver.connect()
        except BaseException as error:
            self._transport.abort()
            if loop.time() >= deadline:
                raise TimeoutError from error
            refusal = streams.refusal()
            if refusal is not None:
                raise ConnectionError(refusal) from error
            raise
        finally:
            overdue.cancel()

    async def carry(self, call: Call) -> str | None:
        """Send the messages of a call; return the reason why some of them have no verdict, if there are any."""
        assert self._driver is not None
        self._calls += 1
        try:
            async with asyncio.timeout_at(call.deadline):
                await self._driver.ready()  # it waits as long as the server blocks publishers
                return await self._publish(call)
        except TimeoutError:
            if await self._is_blocked():
                # The server will read later what we have sent. With a connection for each attempt, it would read as
                # many copies.
                return f"{self._server} blocks publishers, because its memory or disk is full"
            reason = f"no answer within {call.seconds:g} s"
        except Exception as error:  # whatever the driver raises, nothing can be said of this connection any more
            reason = f"the connection was lost: {self._target.without_user(words_of(error))}"
        finally:
            self._calls -= 1
        await self.close()
        return f"{self._server}: {reason}"

    async def close(self) -> None:
        """Close the socket; whatever is under way is given up."""
        self._is_closed = True
        # The driver would write what is left, which hangs on a dead peer and sends late copies to a living one.
        if self._transport is not None:
            self._transport.abort()
        await self._close_driver()

    async def leave(self) -> None:
        """Close the connection as the protocol wants it, if no call uses it."""
        if not self._calls:
            await self._close_driver()
        await self.close()

    async def _close_driver(self) -> None:
        with suppress(Exception):
            async with asyncio.timeout(0.5):
                if self._driver is not None:
                    await self._driver.close()

    async def _publish(self, call: Call) -> str | None:
        """Publish on one channel after the other, until each message has a verdict."""
        while call.chains.left:
            channel = await self._channel()
            try:
                reason = await channel.carry(call)
            finally:
                self._idle.append(channel)
            if reason is not None and not call.blame(self._target.without_user(reason)):
                return f"{self._server}: {self._target.without_user(reason)}"
        return None

    async def _channel(self) -> Channel:
        """Return a channel that no call uses."""
        assert self._driver is not None
        while self._idle:
            channel = self._idle.pop()
            if not channel.is_closed:
                return channel
        opened = await self._driver.channel(on_return_raises=True)
        assert isinstance(opened, DriverChannel)
        return Channel(opened, self._target.exchange, self._driver.connection_tune.frame_max or _FRAME_MAX)

    async def _is_blocked(self) -> bool:
        assert self._driver is not None
        try:
            async with asyncio.timeout(0):
                await self._driver.ready()
        except TimeoutError:
            return not self.is_lost
        return False


class _Streams(TransportFactory):
    """Opens a connection for the driver, so that we keep the means to cut it off, and see why a server refuses us."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reader = _Reader(loop=loop)
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.WriteTransport:
        protocol = asyncio.StreamReaderProtocol(self._reader, loop=self._loop)
        transport, _ = await self._loop.create_connection(lambda: protocol, host, port, ssl=tls)
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, self._loop)
        return transport

    async def create(self, url: URL, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self._writer is not None
        return self._reader, self._writer

    def refusal(self) -> str | None:
        """Return the reason for which the server has closed the connection instead of letting us in."""
        with suppress(Exception):  # any program may have answered, and anything
            _, _, frame = pamqp.frame.unmarshal(self._reader.last)
            if isinstance(frame, commands.Connection.Close):
                return frame.reply_text
        return None


class _Reader(asyncio.StreamReader):
    """Keeps what the server has said last; of a refusal the driver would only say that it is not what it expected."""

    last = b""

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.last = bytes(data)
        super().feed_data(data)
