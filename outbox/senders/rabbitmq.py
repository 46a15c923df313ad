"""RabbitMQ, by aio-pika: URL `amqp://user:password@host:port,host2/vhost?exchange=orders&timeout=5`.

A topic is a routing key. The path is the virtual host, by default `/`. Messages go to `exchange`, or else to the
default exchange, where a routing key is the name of a queue. `amqps://` speaks TLS; the option `ca` is the path of a
file with the certificates to trust instead of the system's. Several hosts are asked in random order.

A message is `Done` when the server has confirmed the message and has not returned it: every queue of the routing key
has a copy. The server returns a message, which is then `Unavailable`, if no queue is bound for the routing key.

A consumer finds the id in the property `message_id`, the second of its creation in `timestamp`, and the type of the
body in `content_type`. The other fields are headers with the names of `outbox.senders.headers`, and `read_message`
makes a `Message` of all of them. RabbitMQ drops no second copy; an `Inbox` handles a message once.

The server closes a channel, with every unconfirmed message on it, for the fault of a single message. Then the messages
at fault get their verdict, and the others are published again on another channel.

RabbitMQ cannot carry a body above the server's `max_message_size`, headers above its `frame_max`, or headers that
servers obey or add (`CC`, `BCC`, `x-death` and others). The verdict is `Reject`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, SupportsIndex
from urllib.parse import quote

from outbox.errors import MissingExtraError
from outbox.model.message import Message
from outbox.senders.address import Address, host_and_port
from outbox.senders.connection_log import ConnectionLog, OfOthers, reason_of
from outbox.senders.headers import CONTENT_TYPE, ID, read_headers
from outbox.senders.port import Doubt, Stored
from outbox.senders.remote import Call, Connection, RemoteSender
from outbox.senders.tls import TLS_OPTIONS, Tls

try:
    import pamqp.frame
    from aio_pika.abc import AbstractIncomingMessage
    from aiormq import AMQPError, AuthenticationError, TransportFactory
    from aiormq import Channel as DriverChannel
    from aiormq import Connection as DriverConnection
    from pamqp import commands

    from outbox.senders.rabbitmq_channel import RESERVED, Channel, Faults, loss_of_queue
except ImportError as error:
    raise MissingExtraError("RabbitMQ needs an extra: pip install 'outbox-log[rabbitmq]'") from error

_OPTIONS = ("exchange", "timeout", "mechanism", *TLS_OPTIONS)
_MECHANISMS = {"plain": "PLAIN", "external": "EXTERNAL"}
_PORTS = {"amqp": 5672, "amqps": 5671}
_USER = re.compile(r"\buser '[^']*'")
#: Bytes of a frame for a server that has no limit.
_FRAME_MAX = 128 * 1024
#: Seconds between two heartbeats; a connection without any for three times as long counts as lost.
_HEARTBEAT = 10


for _logger in ("aiormq.connection", "aiormq.channel"):
    # The driver logs every loss of a connection, with a traceback.
    logging.getLogger(_logger).addFilter(OfOthers("outbox-rabbitmq", math.inf))


class RabbitSender(RemoteSender):
    """A sender that publishes messages to an exchange; at most one message of a key is unconfirmed."""

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        address = Address.of(url, form="amqp://host:port/vhost?exchange=name", options=_OPTIONS)
        target = _Target.of(address)
        super().__init__(
            "RabbitMQ",
            url,
            address.servers,
            lambda server, log: _Connection(server, log, target),
            seconds=address.timeout(timeout),
        )

    def doubts(self, topics: Mapping[str, Stored]) -> list[Doubt]:
        """Return the doubts about what takes these topics; see `Sender`."""
        return self._doubts(topics)


def read_message(received: AbstractIncomingMessage) -> Message:
    """Return the message that a consumer received from a queue, without its place in the log.

    Raises:
        KeyError: it has no `message_id`, so it was not written by an outbox.
        ValueError: its `message_id` is no UUID, which means the same.
    """
    if received.message_id is None:
        raise KeyError("message_id")
    # Brokers add headers on the way, for example when they deliver a message again.
    headers = {
        name: value for name, value in received.headers.items() if isinstance(value, str) and not RESERVED.holds(name)
    }
    headers[ID] = received.message_id
    if received.content_type is not None:
        headers[CONTENT_TYPE] = received.content_type
    return read_headers(received.routing_key or "", received.body, headers)


@dataclass(frozen=True, slots=True)
class _Target:
    """The parts of a URL that say where messages go."""

    address: Address
    vhost: str
    exchange: str
    tls: Tls | None
    mechanism: str

    @classmethod
    def of(cls, address: Address) -> _Target:
        """Return the target of an address, or refuse the address."""
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
        tls, mechanism = address.tls("amqps"), address.choice("mechanism", _MECHANISMS)
        if mechanism == "EXTERNAL":
            if address.user is not None:
                address.refuse("with mechanism=external the certificate says who logs in; leave out user and password")
            if tls is None or tls.cert is None:
                address.refuse("mechanism=external needs amqps:// and a certificate; give cert and key")
        return cls(address, vhost, exchange, tls, mechanism)

    def url(self, host: str, port: int) -> str:
        """Return the URL of one server for the driver, which takes the virtual host in another way."""
        login = "" if self.address.user is None else quote(self.address.user, safe="")
        if self.address.password is not None:
            login += f":{quote(self.address.password, safe='')}"
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        options = f"heartbeat={_HEARTBEAT}&auth={self.mechanism}"
        return f"{self.address.scheme}://{login}{'@' if login else ''}{server}/?{options}"


class _Connection(Connection):
    """One connection to one server, with channels for the calls."""

    def __init__(self, server: str, log: ConnectionLog, target: _Target) -> None:
        super().__init__(server, log)
        self._target = target
        self._driver: DriverConnection | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._idle: list[Channel] = []

    @property
    def is_lost(self) -> bool:
        return self.is_closed or self._driver is None or self._driver.is_closed

    async def open(self, deadline: float) -> None:
        address, loop = self._target.address, asyncio.get_running_loop()
        host, port = host_and_port(self.server.partition("://")[2], _PORTS[address.scheme])
        streams = _Streams(loop)
        tls = self._target.tls
        async with asyncio.timeout_at(deadline):
            self._transport = await streams.open(host, port, tls.context() if tls else None)
        self._driver = DriverConnection(self._target.url(host, port), transport_factory=streams)
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
            if tls is not None and isinstance(error.__cause__ or error, (ConnectionResetError, BrokenPipeError)):
                # With the connection the server's words about a certificate may be lost.
                raise ConnectionError(f"{reason_of(error)} at the login; another certificate may be wanted") from error
            raise
        finally:
            overdue.cancel()
        self.log.connected(self.server)

    async def carry(self, call: Call) -> None:
        assert self._driver is not None
        try:
            async with asyncio.timeout_at(call.deadline):
                await self._driver.ready()  # it waits as long as the server blocks publishers
                await self._publish(call)
        except TimeoutError:
            if not await self._is_blocked():
                raise
            # The server will read later what we have sent. With a connection for each attempt, it would read as many
            # copies.
            blocked = f"{self.server} blocks publishers, because its memory or disk is full"
            call.chains.give_up(self.log.lost(blocked))

    async def doubts(self, topics: Mapping[str, Stored]) -> list[Doubt]:
        """Ask for the queues that the default exchange fills; which queues another exchange fills, nobody tells."""
        assert self._driver is not None
        found = []
        for topic in () if self._target.exchange else topics:
            problem = await loss_of_queue(self._driver, topic)
            if problem is not None:
                found.append(Doubt(f"queue {topic}", problem, "make a durable queue, at best of the type quorum"))
        return found

    async def close(self) -> None:
        self.is_closed = True
        # The driver would write what is left, which hangs on a dead peer and sends late copies to a living one.
        if self._transport is not None:
            self._transport.abort()
        await self._close_driver()

    async def leave(self) -> None:
        if not self.calls:
            await self._close_driver()  # as the protocol wants it
        await self.close()

    def words(self, error: Exception) -> str:
        """Return the server's or the system's words, without the name of the user."""
        if isinstance(error, AuthenticationError):  # with the mechanisms that the server offers
            return f"the server does not offer the mechanism {self._target.mechanism}, only {error.args[0]}"
        reason = reason_of(error)
        if isinstance(error, AMQPError) and error.args and reason == str(error):
            reason = str(error.args[-1])
        return self._without_user(reason)

    async def _close_driver(self) -> None:
        with suppress(Exception):
            async with asyncio.timeout(0.5):
                if self._driver is not None:
                    await self._driver.close()

    async def _publish(self, call: Call) -> None:
        """Publish on one channel after the other, until each message has a verdict."""
        faults = Faults(call)
        while call.chains.left:
            channel = await self._channel()
            try:
                reason = await channel.carry(call, faults)
            finally:
                self._idle.append(channel)
            if reason is not None and not faults.blame(self._without_user(reason)):
                call.chains.give_up(self.log.lost(f"{self.server}: {self._without_user(reason)}"))

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

    def _without_user(self, said: str) -> str:
        """Return the words of the server without the name of the user."""
        # With a certificate, only the server knows the name.
        known = said.replace(f"user '{self._target.address.user or 'guest'}'", "the user")
        return _USER.sub("the user", known)


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

    async def create(self, url: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
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
