"""Exchanges of a RabbitMQ server for tests, and what stands in for a server where one has to be watched closely."""

import asyncio
import base64
import hashlib
import os
import queue
import socket
import struct
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Self

import aio_pika
import pamqp.frame
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from pamqp.base import Frame
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel, Confirm, Connection
from pamqp.common import FieldTable
from pamqp.exceptions import UnmarshalingException

from outbox.senders.rabbitmq import RabbitSender, read_message
from outbox.testing.sender_contract import TOPICS, Stored
from tests.support.remote import Place, stored_of
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.rabbitmq import RabbitServer


class Exchange(Place):
    """A topic exchange and one queue, which at first takes every topic; senders reach it through a proxy."""

    sender = RabbitSender

    def __init__(self, server: RabbitServer, proxy: TcpProxy, **queue_arguments: Any) -> None:
        super().__init__(proxy)
        self.server = server
        self.name = f"x{uuid.uuid4().hex[:12]}"
        self.url = f"amqp://127.0.0.1:{proxy.port}/?exchange={self.name}"
        self._runner = asyncio.Runner()
        self._read: list[AbstractIncomingMessage] = []
        self._bound = ["#"]
        self._runner.run(self._declare(queue_arguments))

    def received(self) -> list[AbstractIncomingMessage]:
        """What a consumer gets, from the first message on."""
        self._runner.run(self._read_on())
        return self._read

    def stored(self) -> list[Stored]:
        """The same as a consumer of an outbox reads it."""
        return [stored_of(read_message(received)) for received in self.received()]

    def raw(self) -> list[tuple[uuid.UUID, object]]:
        """The routing key, the properties and the body of every message."""
        return [
            (uuid.UUID(each.message_id), (each.routing_key, each.properties.marshal(), each.body))
            for each in self.received()
        ]

    def run(self, action: Callable[[AbstractChannel], Coroutine[Any, Any, object]]) -> None:
        """Do something on a channel that does not go through the proxy."""

        async def act() -> None:
            async with self._channel() as channel:
                await action(channel)

        self._runner.run(act())

    def publish(self, topic: str, body: bytes, **properties: Any) -> None:
        """Store something that no outbox sent."""

        async def act(channel: AbstractChannel) -> None:
            exchange = await channel.get_exchange(self.name, ensure=False)
            await exchange.publish(aio_pika.Message(body, **properties), topic)

        self.run(act)

    def take(self, *topics: str) -> None:
        """From now on the queue takes only these."""

        async def act(channel: AbstractChannel) -> None:
            queue = await channel.get_queue(self.name, ensure=False)
            for topic in topics:
                await queue.bind(self.name, topic)
            for topic in set(self._bound) - set(topics):
                await queue.unbind(self.name, topic)

        self.run(act)
        self._bound = list(topics)

    def make_queue(self, name: str, **kind: Any) -> None:
        """Declare another queue."""
        self.run(lambda channel: channel.declare_queue(name, **kind))

    def has_queue(self, name: str) -> bool:
        """Whether the server has another queue."""
        try:
            self.run(lambda channel: channel.declare_queue(name, passive=True))
        except aio_pika.exceptions.ChannelNotFoundEntity:
            return False
        return True

    def remove_queue(self, name: str) -> None:
        """Delete another queue."""
        self.run(lambda channel: channel.queue_delete(name))

    def fail(self, topic: str) -> None:
        """Take the others only."""
        self.take(*(other for other in TOPICS if other != topic))

    def close(self) -> None:
        """Remove the exchange and its queue."""

        async def act(channel: AbstractChannel) -> None:
            await channel.queue_delete(self.name)
            await channel.exchange_delete(self.name)

        self.run(act)
        self._runner.close()

    async def _declare(self, queue_arguments: dict[str, Any]) -> None:
        async with self._channel() as channel:
            exchange = await channel.declare_exchange(self.name, "topic", durable=True)
            queue = await channel.declare_queue(self.name, durable=True, arguments=queue_arguments)
            await queue.bind(exchange, "#")

    async def _read_on(self) -> None:
        """Read what is stored. A message of our own, put behind it, says where that ends."""
        mark, is_over = uuid.uuid4().hex, asyncio.Event()

        async def keep(received: AbstractIncomingMessage) -> None:
            if received.app_id == mark:
                is_over.set()
            else:
                self._read.append(received)

        async with self._channel() as channel:
            queue = await channel.get_queue(self.name, ensure=False)
            consumer = await queue.consume(keep, no_ack=True)
            await channel.default_exchange.publish(aio_pika.Message(b"", app_id=mark), self.name)
            await asyncio.wait_for(is_over.wait(), 120)
            await queue.cancel(consumer)

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[AbstractChannel]:
        async with await aio_pika.connect(self.server.url) as connection:
            yield await connection.channel(on_return_raises=True)


class Witness:
    """Stands in for RabbitMQ: it sees what arrives, and confirms when it is told to. It serves one connection."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # hardly anything arrives unread
        self.url = f"amqp://127.0.0.1:{self._socket.getsockname()[1]}/?exchange=orders"
        self._arrived: queue.Queue[bytes] = queue.Queue()
        self._waiting: list[bytes] = []
        self._confirmed = 0
        self._client: socket.socket | None = None
        self._reads = threading.Event()
        self._reads.set()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()
        if self._client is not None:
            self._client.close()

    def arrivals(self, at_least: int) -> list[bytes]:
        """The bodies that wait for a confirmation, sorted; `at_least` so many, and what comes right behind."""
        while len(self._waiting) < at_least:
            self._waiting.append(self._arrived.get(timeout=60))
        time.sleep(0.2)
        while not self._arrived.empty():
            self._waiting.append(self._arrived.get())
        return sorted(self._waiting)

    def confirm(self, *, at_once: bool = False) -> None:
        """Confirm what waits: one by one, or all by one frame."""
        first, last = self._confirmed + 1, self._confirmed + len(self._waiting)
        for tag in [last] if at_once else range(first, last + 1):
            self._say(Basic.Ack(tag, at_once))
        self._settled()

    def refuse(self) -> None:
        """Say of what waits that it is not stored, by one frame."""
        self._say(Basic.Nack(self._confirmed + len(self._waiting), True, False))
        self._settled()

    def pause(self) -> None:
        """Read nothing more."""
        self._reads.clear()

    def read_to_the_end(self) -> int:
        """Read on, until the client ends the connection; return how many bodies have come meanwhile."""
        self._reads.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._arrived.qsize()

    def close_connection(self, code: int, reason: str) -> None:
        """Close the connection as an operator does, or a server that shuts down."""
        self._say(Connection.Close(code, reason, 0, 0), channel=0)

    def _settled(self) -> None:
        self._confirmed += len(self._waiting)
        self._waiting = []

    def _say(self, frame: Frame, channel: int = 1) -> None:
        assert self._client is not None
        self._client.sendall(pamqp.frame.marshal(frame, channel))

    def _serve(self) -> None:
        with suppress(OSError, struct.error, UnmarshalingException):  # the client may end in mid-frame
            self._client, _ = self._socket.accept()
            assert self._client.recv(8).startswith(b"AMQP")
            capabilities: FieldTable = {"publisher_confirms": True, "basic.nack": True, "connection.blocked": True}
            self._say(Connection.Start(0, 9, {"capabilities": capabilities}, "PLAIN", "en_US"), channel=0)
            with self._client.makefile("rb") as stream:
                while True:
                    self._hear(stream)

    def _hear(self, stream: Any) -> None:
        """Read a frame, and answer as a server does."""
        self._reads.wait()
        start = stream.read(7)
        _, channel, size = struct.unpack(">BHI", start)
        _, _, frame = pamqp.frame.unmarshal(start + stream.read(size + 1))
        answers: dict[type, Frame] = {
            Connection.StartOk: Connection.Tune(2047, 131_072, 60),
            Connection.Open: Connection.OpenOk(),
            Connection.Close: Connection.CloseOk(),
            Channel.Open: Channel.OpenOk(),
            Confirm.Select: Confirm.SelectOk(),
        }
        if type(frame) in answers:
            self._say(answers[type(frame)], channel)
        elif isinstance(frame, ContentBody):
            self._arrived.put(frame.value)


@contextmanager
def out_of_memory(server: RabbitServer) -> Iterator[None]:
    """Let the server believe that its memory is full: it reads nothing more from those who publish."""
    server.control("set_vm_memory_high_watermark", "absolute", "1")
    try:
        yield
    finally:
        server.control("set_vm_memory_high_watermark", "absolute", "512MB")


def user(name: str, password: str, tags: str = "") -> dict[str, str]:
    """A user as RabbitMQ's definitions have it."""
    salt = os.urandom(4)
    hashed = base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()
    return {
        "name": name, "password_hash": hashed, "hashing_algorithm": "rabbit_password_hashing_sha256", "tags": tags,
    }  # fmt: skip
