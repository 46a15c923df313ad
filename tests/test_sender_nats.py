"""NATS JetStream: the contract over a network that fails, and what only this destination can do wrong."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import nats as driver
import pytest
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from outbox.errors import SenderError
from outbox.message import Message
from outbox.sender import Sender
from outbox.senders.nats import NatsSender, read_message
from outbox.testing.proxy import TcpProxy
from outbox.testing.sender_contract import (
    TOPICS,
    Destination,
    SenderContract,
    Stored,
    a_message,
    check_all_done,
    check_eventually_done,
    check_stored,
)
from outbox.testing.servers import NatsServer
from outbox.verdict import DONE, Reject, Unavailable


class _Stream(Destination):
    """One stream that takes every subject behind a prefix of its own, reached through a proxy."""

    deadline = 1.5

    def __init__(self, server: NatsServer, proxy: TcpProxy) -> None:
        self.prefix = f"p{uuid.uuid4().hex[:12]}"
        self.url = f"nats://127.0.0.1:{proxy.port}/{self.prefix}"
        self._proxy = proxy
        self._runner = asyncio.Runner()
        self._read: list[driver.aio.client.Msg] = []
        self._runner.run(self._create(server))

    def open(self) -> NatsSender:
        return NatsSender(self.url, timeout=timedelta(seconds=self.deadline))

    def received(self) -> list[driver.aio.client.Msg]:
        """What a consumer gets, from the first message on."""
        self._runner.run(self._read_on())
        return self._read

    def stored(self):
        fields = ("message_id", "topic", "key", "tags", "headers", "content_type", "body")
        found = [read_message(received, prefix=self.prefix) for received in self.received()]
        return [Stored(**{field: getattr(message, field) for field in fields}) for message in found]

    def take(self, *subjects: str) -> None:
        """From now on the stream takes only these, behind the prefix."""
        taken = [f"{self.prefix}.{subject}" for subject in subjects]
        self._runner.run(self._js.update_stream(StreamConfig(name=self.prefix, subjects=taken)))

    def fail(self, topic):
        self.take(*(other for other in TOPICS if other != topic))

    def disappear(self):
        self._proxy.refuse()

    def fall_silent(self):
        self._proxy.black_hole()

    def lose_next_answer(self):
        self._proxy.cut_after(0, "to_client")

    def recover(self):
        self._proxy.pass_through()

    def close(self):
        self._runner.run(self._js.delete_stream(self.prefix))
        self._runner.run(self._client.close())
        self._runner.close()

    async def _create(self, server):
        self._client = await driver.connect(server.url)
        self._js = self._client.jetstream()
        await self._js.add_stream(name=self.prefix, subjects=[f"{self.prefix}.>"])
        config = ConsumerConfig(ack_policy=AckPolicy.NONE)
        consumer = await self._js.add_consumer(self.prefix, config)
        self._reader = await self._js.pull_subscribe_bind(consumer.name, stream=self.prefix)

    async def _read_on(self):
        last = (await self._js.stream_info(self.prefix)).state.last_seq
        while len(self._read) < last:
            self._read += await self._reader.fetch(min(500, last - len(self._read)), timeout=5)


@pytest.fixture
def stream(nats: NatsServer) -> Iterator[_Stream]:
    """A stream of this test, behind a proxy of this test."""
    with TcpProxy("127.0.0.1", nats.port) as proxy:
        stream = _Stream(nats, proxy)
        yield stream
        stream.close()


@pytest.fixture
def sender(stream: _Stream) -> Iterator[NatsSender]:
    """A sender to that stream."""
    sender = stream.open()
    yield sender
    sender.close()


class TestNatsSender(SenderContract):
    """JetStream passes the contract."""

    @pytest.fixture
    def destination(self, stream):
        """A stream of its own for each test."""
        return stream
