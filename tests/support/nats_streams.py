"""Streams of a NATS server for tests, and what stands in for a server where one has to be watched closely."""

import asyncio
import uuid
from contextlib import suppress
from typing import Any, Self

import nats
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig
from nats.js.errors import NotFoundError

from outbox.senders.nats import NatsSender, read_message
from outbox.testing.sender_contract import TOPICS, Stored
from outbox.testing.servers import NatsServer
from tests.support.remote import Place, life_of, stored_of
from tests.support.servers.proxy import TcpProxy


class Stream(Place):
    """A stream that takes every subject behind a prefix of its own, reached through a proxy."""

    sender = NatsSender

    def __init__(self, server: NatsServer, proxy: TcpProxy) -> None:
        super().__init__(proxy)
        self.server = server
        self.prefix = f"p{uuid.uuid4().hex[:12]}"
        self.url = f"nats://127.0.0.1:{proxy.port}/{self.prefix}"
        self._runner = asyncio.Runner()
        self._read: list[Msg]
        self._runner.run(self._connect(anew=True))

    def received(self) -> list[Msg]:
        """What a consumer gets, from the first message on; after the server has begun anew, another consumer."""
        if self._life != life_of(self.server):
            self._runner.run(self._client.close())
            self._runner.run(self._connect())
        self._runner.run(self._read_on())
        return self._read

    def stored(self) -> list[Stored]:
        """The same as a consumer of an outbox reads it."""
        return [stored_of(read_message(received, prefix=self.prefix)) for received in self.received()]

    def held(self) -> list[tuple[str, bytes]]:
        """What is in it now, in order: what of the subject stands behind the prefix, and the body."""
        return self._runner.run(self._look())

    def remove(self, sequence: int) -> None:
        """As a limit or the consumer of a work queue does."""
        self._runner.run(self._jetstream.delete_msg(self.prefix, sequence))

    def publish(self, topic: str, body: bytes) -> None:
        """Store something that no outbox sent."""
        self._runner.run(self._jetstream.publish(f"{self.prefix}.{topic}", body))

    def take(self, *topics: str, **limits: Any) -> None:
        """From now on the stream takes only these, within these limits."""
        config = StreamConfig(name=self.prefix, subjects=[f"{self.prefix}.{topic}" for topic in topics], **limits)
        self._runner.run(self._jetstream.update_stream(config))

    def fail(self, topic: str) -> None:
        """Take the others only."""
        self.take(*(other for other in TOPICS if other != topic))

    def close(self) -> None:
        """Remove the stream."""
        self._runner.run(self._jetstream.delete_stream(self.prefix))
        self._runner.run(self._client.close())
        self._runner.close()

    async def _connect(self, *, anew: bool = False) -> None:
        self._life, self._read = life_of(self.server), []
        self._client = await nats.connect(self.server.url)
        self._jetstream = self._client.jetstream()
        if anew:
            await self._jetstream.add_stream(name=self.prefix, subjects=[f"{self.prefix}.>"])
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=3600)
        consumer = await self._jetstream.add_consumer(self.prefix, config)
        self._reader = await self._jetstream.pull_subscribe_bind(consumer.name, stream=self.prefix)

    async def _look(self) -> list[tuple[str, bytes]]:
        last = (await self._jetstream.stream_info(self.prefix)).state.last_seq
        found = []
        for place in range(1, last + 1):
            with suppress(NotFoundError):
                held = await self._jetstream.get_msg(self.prefix, place)
                found.append(((held.subject or "").removeprefix(f"{self.prefix}."), held.data or b""))
        return found

    async def _read_on(self) -> None:
        last = (await self._jetstream.stream_info(self.prefix)).state.last_seq
        while len(self._read) < last:
            self._read += await self._reader.fetch(min(500, last - len(self._read)), timeout=60)


class Witness:
    """Stands in for JetStream: it sees what arrives, and acknowledges when it is told to."""

    def __init__(self, server: NatsServer) -> None:
        self.prefix = f"w{uuid.uuid4().hex[:12]}"
        self.url = f"{server.url}/{self.prefix}"
        self._waiting: list[Msg] = []
        self._runner = asyncio.Runner()
        self._runner.run(self._listen(server.url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def arrivals(self, at_least: int) -> list[bytes]:
        """The bodies that wait for an answer, sorted; `at_least` so many, and what comes right behind."""
        self._runner.run(self._collect(at_least))
        return sorted(message.data for message in self._waiting)

    def answer(self, data: bytes = b'{"stream": "S", "seq": 1}') -> None:
        """Answer all of them, by default as JetStream acknowledges."""
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self._runner.run(message.respond(data))
        self._runner.run(self._client.flush())

    async def _listen(self, url: str) -> None:
        self._client = await nats.connect(url)
        self._subscription = await self._client.subscribe(f"{self.prefix}.>")
        await self._client.flush()

    async def _collect(self, at_least: int) -> None:
        while len(self._waiting) < at_least:
            self._waiting.append(await self._subscription.next_msg(timeout=60))
        await asyncio.sleep(0.2)
        while self._subscription.pending_msgs:
            self._waiting.append(await self._subscription.next_msg(timeout=60))


def make_stream(url: str, *subjects: str, **credentials: Any) -> None:
    """Create a stream."""

    async def make() -> None:
        client = await nats.connect(url, allow_reconnect=False, **credentials)
        await client.jetstream().add_stream(name="S", subjects=list(subjects))
        await client.close()

    asyncio.run(make())
