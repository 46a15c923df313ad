"""RabbitMQ, by aio-pika: URL `amqp://user:password@host:port,host2/vhost?exchange=orders&timeout=5`.

A topic is a routing key. The path is the virtual host; without one it is `/`. Messages go to `exchange`, or else to the
default exchange, where a routing key is the name of a queue. `amqps://` speaks TLS; its option `ca` is the path of a
file with the certificates to trust instead of the system's. Several hosts are asked in random order.

A message is `Done` when the server has confirmed it and has not returned it: every queue that it was routed to has it.
It is returned, and `Unavailable`, if no queue is bound for its routing key.

A consumer finds the id in the property `message_id`, the second of its creation in `timestamp`, and the type of the
body in `content_type`. The other fields are headers with the names of `outbox.senders.headers`, and `read_message`
turns all of them back into a `Message`. RabbitMQ drops no second copy; an `Inbox` handles a message once.

The server closes a channel, with everything on it that it has not confirmed, for the fault of a single message. Then
the messages at fault get their verdict, and the others are published again on another channel.

What RabbitMQ cannot carry is answered with `Reject`: a body above the server's `max_message_size`, headers above its
`frame_max`, and headers that it obeys or adds itself (`CC`, `BCC`, `x-death` and others).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import ssl
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, SupportsIndex

from outbox.errors import InvalidMessageError, MissingExtraError
from outbox.model.limits import checked_topic
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.event_loop import BackgroundLoop
from outbox.senders.address import Address, host_and_port
from outbox.senders.connection_log import ConnectionLog
from outbox.senders.headers import CONTENT_TYPE, ID, Reserved, read_headers, wire_headers
from outbox.senders.key_order import Chains
from outbox.senders.port import destination_of
from outbox.senders.rabbitmq_refusals import verdict_of_fault

try:
    import pamqp.frame
    from aio_pika.abc import AbstractIncomingMessage
    from aiormq import AMQPError, Channel, ChannelClosed, Connection, DeliveryError, PublishError, TransportFactory
    from aiormq.abc import ChannelFrame
    from pamqp import commands
    from pamqp.body import ContentBody
    from pamqp.header import ContentHeader
    from yarl import URL
except ImportError as error:
    raise MissingExtraError("RabbitMQ needs an extra: pip install 'outbox-log[rabbitmq]'") from error

#: Servers send copies to the routing keys in `CC` and `BCC`. The others are added, or obeyed, by servers and plugins.
RESERVED = Reserved(
    "RabbitMQ",
    prefixes=("x-first-death-", "x-last-death-", "x-stream-"),
    names=("cc", "bcc", "x-death", "x-delay", "x-delivery-count", "x-received-from"),
)

_THREAD = "outbox-rabbitmq"
_PORTS = {"amqp": 5672, "amqps": 5671}
_PERSISTENT = 2
#: Bytes of a frame around what it carries.
_FRAME_OVERHEAD = 8
#: Bytes of the name of a header. The driver shortens longer ones.
_LONGEST_NAME = 128

_FIX = "send the message anew without that, and discard this one"

#: The most that may wait for a confirmation at once.
_MAX_UNDER_WAY = 512
_MAX_BYTES_UNDER_WAY = 8 * 1024 * 1024
#: Bytes of a frame for a server that has no limit.
_FRAME_MAX = 128 * 1024
#: Seconds between two heartbeats; a connection without any for three times as long counts as lost.
_HEARTBEAT = 10


class _OfOthers(logging.Filter):
    """Passes on what the driver logs of other connections. Of ours it would log every loss, with a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.threadName != _THREAD


for _logger in ("aiormq.connection", "aiormq.channel"):
    logging.getLogger(_logger).addFilter(_OfOthers())


class RabbitSender:
    """A sender that publishes messages to an exchange; at most one message of a key is unconfirmed.

    `send` may be called in any thread, also in several at once, and returns within `timeout` whatever the server does.
    The first call makes a connection. When it fails, or a call runs out of time, the next call makes a new one.
    """

    def __init__(self, url: str, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        self.destination = destination_of(url)
        address = Address.of(url, form="amqp://host:port/vhost?exchange=name", options=("exchange", "timeout", "ca"))
        target = _Target.of(address)
        self._seconds = address.timeout(timeout)
        self.deadline = timedelta(seconds=self._seconds)
        self._loop = BackgroundLoop(_THREAD, make=lambda: _Link(target), farewell=_Link.close)

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages; return one verdict per message, in their order."""
        if not messages:
            return []
        # The loop itself keeps this earlier deadline; the rest is for a machine that is too busy to notice it in time.
        inside = self._seconds * 0.9
        try:
            return self._loop.run(lambda link: link.deliver(messages, inside), timeout=self._seconds)
        except TimeoutError:
            reason = f"no answer within {self._seconds:g} s"
        except CancelledError:
            reason = "the sender was closed"
        return [Unavailable(f"RabbitMQ: {reason}", everything=True)] * len(messages)

    def close(self) -> None:
        """Close the connection and end its thread."""
        self._loop.stop()


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
    """Where messages go, as the URL says."""

    address: Address
    vhost: str
    exchange: str
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, address: Address) -> _Target:
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


class _Link:
    """At most one connection to the servers of an address, made when it is needed. Used in one event loop."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._log = ConnectionLog(logging.getLogger(__name__), "RabbitMQ")

    async def deliver(self, messages: Sequence[Message], seconds: float) -> list[Verdict]:
        """Send a call's messages; what was not confirmed after `seconds` is `Unavailable`."""
        call = _Call(messages, seconds)
        try:
            async with asyncio.timeout_at(call.deadline), self._connecting:
                connection = await self._connected(call.deadline)
        except OSError as error:
            return [Unavailable(self._log.lost(_text(error)), everything=True)] * len(messages)
        reason = await connection.carry(call)
        if reason is not None:
            call.chains.give_up(self._log.lost(reason))
        return call.chains.verdicts()

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.leave()

    async def _connected(self, deadline: float) -> _Connection:
        """Return the connection, else a new one to the first server that answers; they are asked in random order."""
        if self._connection is not None and not self._connection.is_lost:
            return self._connection
        hosts = random.sample(self._target.address.hosts, len(self._target.address.hosts))
        errors = []
        for asked, host in enumerate(hosts):
            server = f"{self._target.address.scheme}://{host}"
            # Some time must be left for the servers that come later, and for the messages.
            now = asyncio.get_running_loop().time()
            share = (deadline - now) / (len(hosts) - asked + 1)
            connection = _Connection(self._target, server)
            try:
                await connection.open(*host_and_port(host, _PORTS[self._target.address.scheme]), now + share)
            except Exception as error:  # any program may listen at that port, and answer anything
                errors.append(f"{server}: {self._target.without_user(_text(error))}")
            else:
                self._log.connected(server)
                self._connection = connection
                return connection
        raise ConnectionError("; ".join(errors))


class _Connection:
    """One connection to one server. Once it fails or does not answer, it is closed and never used again."""

    def __init__(self, target: _Target, server: str) -> None:
        self._target = target
        self._server = server
        self._driver: Connection | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._idle: list[_Channel] = []
        self._calls = 0
        self._is_closed = False

    @property
    def is_lost(self) -> bool:
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
        self._driver = Connection(url, transport_factory=streams)
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

    async def carry(self, call: _Call) -> str | None:
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
            reason = f"the connection was lost: {self._target.without_user(_text(error))}"
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

    async def _publish(self, call: _Call) -> str | None:
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

    async def _channel(self) -> _Channel:
        """Return a channel that no call uses."""
        assert self._driver is not None
        while self._idle:
            channel = self._idle.pop()
            if not channel.is_closed:
                return channel
        opened = await self._driver.channel(on_return_raises=True)
        assert isinstance(opened, Channel)
        return _Channel(opened, self._target.exchange, self._driver.connection_tune.frame_max or _FRAME_MAX)

    async def _is_blocked(self) -> bool:
        assert self._driver is not None
        try:
            async with asyncio.timeout(0):
                await self._driver.ready()
        except TimeoutError:
            return not self.is_lost
        return False


class _Channel:
    """One channel, used by one call at a time. It expects the confirmation of each message without a task for it."""

    def __init__(self, driver: Channel, exchange: str, frame_max: int) -> None:
        self._driver = driver
        self._exchange = exchange
        self._frame_max = frame_max
        self._news = asyncio.Event()
        self._closing = driver.closing
        self._closing.add_done_callback(lambda _: self._news.set())

    @property
    def is_closed(self) -> bool:
        return self._driver.is_closed

    async def carry(self, call: _Call) -> str | None:
        """Publish messages until each has its verdict; return why the server closed the channel, if it did.

        Raises:
            ConnectionError: the connection was lost.
        """
        published = [self._publish(call, index) for index in call.chains.under_way()]  # by a channel that was closed
        while not self._closing.done():
            while (index := call.chains.take()) is not None:
                published.append(self._publish(call, index))
            if any(published):
                payload = b"".join(published)
                await self._driver.write_queue.put(ChannelFrame(payload=payload, should_close=False))
                published.clear()
            if not call.chains.left:
                return None
            await self._news.wait()
            self._news.clear()
        error = None if self._closing.cancelled() else self._closing.exception()
        if isinstance(error, ChannelClosed):
            return str(error.args[-1])
        raise ConnectionError(_text(error))

    def _publish(self, call: _Call, index: int) -> bytes:
        """Return the frames that publish a message, and expect its confirmation; or settle what cannot be published."""
        message, frames = call.messages[index], b""
        verdict = call.verdict_of_fault(message)
        if verdict is None:
            try:
                frames = self._frames(message)
            except InvalidMessageError as error:
                verdict = Reject(str(error))
            except Exception as error:  # a row may hold anything, and the driver may choke on it in any way
                verdict = Reject(f"RabbitMQ cannot carry it: {_text(error)}")
        id = "" if verdict is not None else str(message.message_id)
        if id in self._driver.message_id_delivery_tag:
            # The server returns messages by their id alone.
            verdict = Unavailable("RabbitMQ: another message of the same id is not confirmed yet")
        if verdict is not None:
            call.chains.settle(index, verdict)
            return b""
        self._expect(call, index, id)
        return frames

    def _frames(self, message: Message) -> bytes:
        """Return the frames that publish a message.

        Raises:
            InvalidMessageError: it is outside the limits of `Message`, or those of RabbitMQ.
        """
        number = self._driver.number
        publish = _publish_frame(self._exchange, message.topic, number)
        header = pamqp.frame.marshal(ContentHeader(0, len(message.body), _properties(message)), number)
        if len(header) > self._frame_max:
            limit = f"must be at most {self._frame_max} bytes on the wire, the server's frame_max, not {len(header)}"
            raise InvalidMessageError("headers", limit, _FIX)
        size = self._frame_max - _FRAME_OVERHEAD
        chunks = (message.body[start : start + size] for start in range(0, len(message.body), size))
        content = (pamqp.frame.marshal(ContentBody(chunk), number) for chunk in chunks)
        return b"".join((publish, header, *content))

    def _expect(self, call: _Call, index: int, id: str) -> None:
        """Have the driver tell what becomes of the message that is published next, as it does for its own."""
        confirmation = self._driver.create_future()
        self._driver.delivery_tag += 1
        self._driver.confirmations[self._driver.delivery_tag] = confirmation
        self._driver.message_id_delivery_tag[id] = self._driver.delivery_tag
        confirmation.add_done_callback(partial(self._confirmed, call, index, id))

    def _confirmed(self, call: _Call, index: int, id: str, confirmation: asyncio.Future[Any]) -> None:
        message = call.messages[index]
        self._driver.message_id_delivery_tag.pop(id, None)
        if confirmation.cancelled():
            return
        error = confirmation.exception()
        if error is None:
            verdict: Verdict = DONE
        elif isinstance(error, PublishError):
            verdict = Unavailable(self._unroutable(message.topic))
        elif isinstance(error, DeliveryError):
            verdict = Unavailable(f"RabbitMQ: a queue for routing key {message.topic!r} refused it; it may be full")
        else:
            return  # the channel was closed, so that nothing is known of this message
        call.chains.settle(index, verdict)
        self._news.set()

    def _unroutable(self, topic: str) -> str:
        if self._exchange:
            return f"RabbitMQ: no queue is bound to exchange {self._exchange!r} for routing key {topic!r}; bind one"
        return f"RabbitMQ: no queue is bound for routing key {topic!r}: the default exchange wants a queue of that name"


class _Call:
    """One call of `send`: its messages and their verdicts, and for what reasons the server closed its channels."""

    __slots__ = ("_reasons", "chains", "deadline", "messages", "seconds")

    def __init__(self, messages: Sequence[Message], seconds: float) -> None:
        self.messages = messages
        self.chains = Chains(messages, most=_MAX_UNDER_WAY, most_bytes=_MAX_BYTES_UNDER_WAY)
        self.seconds = seconds
        self.deadline = asyncio.get_running_loop().time() + seconds
        self._reasons: list[str] = []

    def blame(self, reason: str) -> bool:
        """Settle the messages that are at fault for this reason; return whether there are any."""
        self._reasons.append(reason)
        left = self.chains.left
        for index in self.chains.under_way():
            verdict = verdict_of_fault(reason, self.messages[index])
            if verdict is not None:
                self.chains.settle(index, verdict)
        return self.chains.left < left

    def verdict_of_fault(self, message: Message) -> Verdict | None:
        """Return the verdict on a message that the server would refuse, as far as this call knows."""
        verdicts = (verdict_of_fault(reason, message) for reason in self._reasons)
        return next((verdict for verdict in verdicts if verdict is not None), None)


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


# An application has few topics for very many messages.
@lru_cache(maxsize=1024)
def _publish_frame(exchange: str, topic: str, channel: int) -> bytes:
    """Return the frame that says where a message goes.

    Raises:
        InvalidMessageError: the topic is outside the limits of `Message`.
    """
    publish = commands.Basic.Publish(exchange=exchange, routing_key=checked_topic(topic), mandatory=True)
    return bytes(pamqp.frame.marshal(publish, channel))


def _properties(message: Message) -> commands.Basic.Properties:
    """Return what travels of a message besides its topic and its body.

    Raises:
        InvalidMessageError: the headers of its row cannot travel.
    """
    headers = wire_headers(message, reserved=RESERVED)
    for name in headers:
        if len(name.encode()) > _LONGEST_NAME:
            limit = f"the name must be at most {_LONGEST_NAME} characters"
            raise InvalidMessageError(f"headers[{name!r:.80}]", limit, _FIX)
    return commands.Basic.Properties(
        message_id=headers.pop(ID),
        content_type=headers.pop(CONTENT_TYPE, None),
        timestamp=message.created_at,
        delivery_mode=_PERSISTENT,
        headers=dict(headers) or None,
    )


def _text(error: BaseException | None) -> str:
    # What the socket said is plainer than what the driver makes of it.
    cause = error.__cause__ if isinstance(error, AMQPError) else error
    if isinstance(cause, TimeoutError):
        return "no answer"
    if isinstance(cause, EOFError):
        return "the server closed the connection"
    if isinstance(cause, OSError) and cause.errno in errno.errorcode and not isinstance(cause, ssl.SSLError):
        # The event loop's own text names the address again, and the number of the error.
        return os.strerror(cause.errno or 0).lower()
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    if isinstance(error, AMQPError) and error.args:
        return str(error.args[-1])
    return str(error or "") or type(error).__name__
