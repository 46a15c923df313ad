"""How long a message takes from its commit to a consumer of the destination, against the destination's own producer."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe

import nats
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from benchmarks.arrivals import BARE, Arrivals, Receiver, Writer, differences, quantile, running, stop, warm_up, writer
from benchmarks.latency import Schedule, evenly, write_by
from benchmarks.measure import Goal, Measurement, Turns, at_most
from benchmarks.site import Place, Site
from outbox import Outbox, Relay, create_engine
from outbox.testing.servers import NatsServer
from tests.support.servers.kafka import KafkaServer

#: Seconds after which a consumer notices at the latest that it is to stop.
_POLL = 0.05

Producing = Callable[[str], AbstractContextManager[Writer]]


def latency_nats(site: Site) -> list[Measurement]:
    """Milliseconds from commit to a consumer of JetStream at 50 a second, against nats-py from producer to consumer."""
    with NatsServer() as server:

        def target() -> str:
            name = f"s{uuid.uuid4().hex}"
            asyncio.run(_make_stream(server.url, name))
            return f"{server.url}/{name}"

        return _against(site, "latency_nats", at_most(5), target, _nats_consumer, _nats_producer)


def latency_kafka(site: Site) -> list[Measurement]:
    """Milliseconds from commit to a consumer of Kafka at 50 a second, against confluent-kafka, producer to consumer."""
    with KafkaServer() as server:

        def target() -> str:
            name = f"s{uuid.uuid4().hex}"
            admin = AdminClient({"bootstrap.servers": server.servers})
            for future in admin.create_topics([NewTopic(f"{name}.orders", 1, 1)]).values():
                future.result(10)
            return f"{server.url}/{name}"

        return _against(site, "latency_kafka", at_most(5), target, _kafka_consumer, _kafka_producer)


def _against(
    site: Site, name: str, goal: Goal, target: Callable[[], str], consumer: Receiver, producing: Producing
) -> list[Measurement]:
    medians = Turns(name)
    schedule = evenly(site.scale.latency_messages)
    for _ in range(site.scale.rounds):
        with site.place() as place:
            BARE.metadata.create_all(place.engine)
            ours = _by_relay(place, target(), consumer, schedule)
        url = target()
        with producing(url) as write:
            other = _milliseconds(url, consumer, write, schedule)
        medians.add(quantile(ours, 0.5), quantile(other, 0.5))
    return [Measurement(name=name, goal=goal, unit="ms", ours=medians.ours, other=medians.other)]


def _by_relay(place: Place, url: str, consumer: Receiver, schedule: Schedule) -> list[float]:
    """The latency of each message, which a relay takes in a process of its own."""
    with running(partial(_relay, to=url), place.url) as relaying:
        found = _milliseconds(url, consumer, writer(Outbox(place.engine)), schedule)
        relaying.send("stop")
    return found


def _milliseconds(url: str, consumer: Receiver, write: Writer, schedule: Schedule) -> list[float]:
    """The latency of each message, written by a schedule while the consumer runs in another process."""
    with running(consumer, url) as pipe:
        warm_up(pipe, write)
        written = write_by(schedule, write)
        arrived = stop(pipe)
    return differences(written, arrived)


def _relay(url: str, pipe: Pipe, *, to: str) -> None:
    relay = Relay(Outbox(create_engine(url)), to)

    def stop_when_told() -> None:
        pipe.recv()
        relay.stop()

    threading.Thread(target=stop_when_told, daemon=True).start()
    relay.run()
    relay.close()


async def _make_stream(url: str, name: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
    await client.close()


def _nats_consumer(url: str, pipe: Pipe) -> None:
    asyncio.run(_read_stream(url, pipe))


async def _read_stream(url: str, pipe: Pipe) -> None:
    server, _, prefix = url.rpartition("/")
    client = await nats.connect(server)
    arrived: Arrivals = {}

    async def note(message: Msg) -> None:
        now = time.monotonic_ns()
        if not arrived:
            pipe.send("ready")
        arrived[message.data] = now

    await client.jetstream().subscribe(f"{prefix}.orders", cb=note, ordered_consumer=True)
    while not pipe.poll():
        await asyncio.sleep(_POLL)
    pipe.send(arrived)
    await client.close()


@contextmanager
def _nats_producer(url: str) -> Iterator[Writer]:
    server, _, prefix = url.rpartition("/")
    with asyncio.Runner() as runner:
        client = runner.run(_connected(server))
        stream = client.jetstream()

        async def publish(body: bytes) -> int:
            at = time.monotonic_ns()
            await stream.publish(f"{prefix}.orders", body, headers={"Nats-Msg-Id": str(uuid.uuid4())})
            return at

        yield lambda body: runner.run(publish(body))
        runner.run(client.close())


async def _connected(server: str) -> Client:
    return await nats.connect(server)


def _kafka_consumer(url: str, pipe: Pipe) -> None:
    servers, _, prefix = url.removeprefix("kafka://").partition("/")
    consumer = Consumer({"bootstrap.servers": servers, "group.id": prefix, "auto.offset.reset": "earliest"})
    consumer.subscribe([f"{prefix}.orders"])
    arrived: Arrivals = {}
    while not pipe.poll():
        record = consumer.poll(_POLL)
        now = time.monotonic_ns()
        body = None if record is None or record.error() else record.value()
        if isinstance(body, bytes):
            if not arrived:
                pipe.send("ready")
            arrived[body] = now
    pipe.send(arrived)
    consumer.close()


@contextmanager
def _kafka_producer(url: str) -> Iterator[Writer]:
    """A producer that flushes after each message, so that none waits for others to go with."""
    servers, _, prefix = url.removeprefix("kafka://").partition("/")
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})

    def write(body: bytes) -> int:
        at = time.monotonic_ns()
        producer.produce(f"{prefix}.orders", body, headers=[("Outbox-Id", str(uuid.uuid4()).encode())])
        if producer.flush(10):
            raise RuntimeError("the message was not delivered")
        return at

    yield write
