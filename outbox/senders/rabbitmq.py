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
import logging
import random
from collections.abc import Sequence
from concurrent.futures import CancelledError
from datetime import timedelta

from outbox.errors import MissingExtraError
from outbox.model.message import Message
from outbox.model.verdict import Unavailable, Verdict
from outbox.runtime.event_loop import BackgroundLoop
from outbox.senders.address import Address, host_and_port
from outbox.senders.connection_log import ConnectionLog
from outbox.senders.headers import CONTENT_TYPE, ID, read_headers
from outbox.senders.port import destination_of

try:
    from aio_pika.abc import AbstractIncomingMessage

    from outbox.senders.rabbitmq_channel import Call
    from outbox.senders.rabbitmq_connection import Connection, Target
    from outbox.senders.rabbitmq_frames import RESERVED
    from outbox.senders.rabbitmq_refusals import words_of
except ImportError as error:
    raise MissingExtraError("RabbitMQ needs an extra: pip install 'outbox-log[rabbitmq]'") from error

_THREAD = "outbox-rabbitmq"
_PORTS = {"amqp": 5672, "amqps": 5671}


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
        target = Target.of(address)
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


class _Link:
    """At most one connection to the servers of an address, made when it is needed. Used in one event loop."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._log = ConnectionLog(logging.getLogger(__name__), "RabbitMQ")

    async def deliver(self, messages: Sequence[Message], seconds: float) -> list[Verdict]:
        """Send a call's messages; what was not confirmed after `seconds` is `Unavailable`."""
        call = Call(messages, seconds)
        try:
            async with asyncio.timeout_at(call.deadline), self._connecting:
                connection = await self._connected(call.deadline)
        except OSError as error:
            return [Unavailable(self._log.lost(words_of(error)), everything=True)] * len(messages)
        reason = await connection.carry(call)
        if reason is not None:
            call.chains.give_up(self._log.lost(reason))
        return call.chains.verdicts()

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.leave()

    async def _connected(self, deadline: float) -> Connection:
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
            connection = Connection(self._target, server)
            try:
                await connection.open(*host_and_port(host, _PORTS[self._target.address.scheme]), now + share)
            except Exception as error:  # any program may listen at that port, and answer anything
                errors.append(f"{server}: {self._target.without_user(words_of(error))}")
            else:
                self._log.connected(server)
                self._connection = connection
                return connection
        raise ConnectionError("; ".join(errors))
