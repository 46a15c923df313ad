"""How fast a relay moves messages to a real destination, against the destination's own client, fed from memory.

The client's side has ids, headers and confirmations as well, and keeps the order of a key:

NATS      512 messages under way, or as many as there are keys, so that one of each key is under way
Kafka     the idempotent producer keeps the order itself, with as much under way as it likes
Redis     pipelines of 500 messages, one after the other; with fewer keys each pipeline is a transaction
RabbitMQ  a task for each key publishes one message after the other; all keys are under way at once
webhook   a task for each of 32 connections posts the messages of its share of the keys, one after the other

Where a call may have several messages of a key, or the network takes its time, there is a line each: 50 keys instead of
1000, and the same way to the server for both sides, on which an answer comes 5 ms later.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import aio_pika
import nats
import redis
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from httpx2 import AsyncClient, Limits
from nats.js.api import StreamConfig

from benchmarks.drain import in_a_process_of_its_own
from benchmarks.endpoint import endpoint
from benchmarks.far import far
from benchmarks.measure import Measurement, Turns, at_least
from benchmarks.site import Place, Site
from outbox import Outbox, Relay
from outbox.cli.relay import NEW_OBJECTS
from outbox.testing.servers import NatsServer
from outbox.testing.servers.process import free_port
from tests.support.servers.kafka import KafkaServer
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.servers.redis import RedisServer

_KEYS = 1_000
_FEW_KEYS = 50
#: The time that a far network takes, there and back, and the goal there.
_FAR_SECONDS, _FAR_GOAL = 0.005, 0.7
#: Connections to a webhook, as many as the sender has if nobody says another number.
_CONNECTIONS = 32
_FILL = """
    INSERT INTO outbox_message (message_id, topic, key, slot, body, content_type, headers)
    SELECT gen_random_uuid(), 'orders', 'order-' || i % {keys}, i % {keys} % 256,
           convert_to(rpad(i::text, 300, '.'), 'UTF8'), 'text/plain', '{{"trace": "4bf92f3577b34da6"}}'
    FROM generate_series(1, {count}) AS i
"""


@dataclass(frozen=True, slots=True)
class Raw:
    """A message as a program has it in memory that needs no outbox."""

    key: str
    body: bytes
    headers: dict[str, str]


def nats_vs_raw(site: Site) -> list[Measurement]:
    """Messages a second into a stream of JetStream, against nats-py; also with 50 keys, and 5 ms away."""
    with NatsServer() as server, far(server.port, _FAR_SECONDS) as far_port:

        @contextmanager
        def target(port: int) -> Iterator[str]:
            name = f"s{uuid.uuid4().hex}"
            asyncio.run(_make_stream(server.url, name))
            yield f"nats://127.0.0.1:{port}/{name}"

        ports, count = (server.port, far_port), site.scale.sent
        return _near_and_far(site, "nats_vs_raw", 1.0, target, _by_nats, ports=ports, count=count)


def kafka_vs_raw(site: Site) -> list[Measurement]:
    """Messages a second into a topic of Kafka, against an idempotent producer; also with 50 keys, and 5 ms away."""
    behind, told = free_port(), free_port()
    with KafkaServer(far=(behind, told)) as server, far(behind, _FAR_SECONDS, own_port=told):

        @contextmanager
        def target(port: int) -> Iterator[str]:
            name = f"s{uuid.uuid4().hex}"
            admin = AdminClient({"bootstrap.servers": server.servers})
            for future in admin.create_topics([NewTopic(f"{name}.orders", 3, 1)]).values():
                future.result(10)
            yield f"kafka://127.0.0.1:{port}/{name}"

        ports, count = (server.port, told), site.scale.sent_quickly
        return _near_and_far(site, "kafka_vs_raw", 0.85, target, _by_kafka, ports=ports, count=count)


def redis_vs_raw(site: Site) -> list[Measurement]:
    """Messages a second into a stream of Redis, against redis-py with pipelines; also with 50 keys, and 5 ms away."""
    with RedisServer() as server, far(server.port, _FAR_SECONDS) as far_port:

        @contextmanager
        def target(port: int) -> Iterator[str]:
            yield f"redis://127.0.0.1:{port}/0/s{uuid.uuid4().hex}"

        ports, count = (server.port, far_port), site.scale.sent_quickly
        return _near_and_far(site, "redis_vs_raw", 0.85, target, _by_redis, ports=ports, count=count)


def rabbitmq_vs_raw(site: Site) -> list[Measurement]:
    """Messages a second into a quorum queue of RabbitMQ, against aio-pika with confirmations."""
    with RabbitServer() as server:

        @contextmanager
        def target() -> Iterator[str]:
            name = f"s{uuid.uuid4().hex}"
            asyncio.run(_declare(server.url, name))
            yield f"{server.url}?exchange={name}"
            asyncio.run(_delete(server.url, name))

        return _against(site, "rabbitmq_vs_raw", 0.8, target, _by_rabbitmq, count=site.scale.sent)


def webhook_vs_raw(site: Site) -> list[Measurement]:
    """Messages a second to a web server in another process, against httpx2 with as many connections."""
    with endpoint() as url:

        @contextmanager
        def target() -> Iterator[str]:
            yield f"{url}/hooks/orders"

        return _against(site, "webhook_vs_raw", 0.8, target, _by_webhook, count=site.scale.posted)


def _near_and_far(
    site: Site,
    name: str,
    goal: float,
    target: Callable[[int], AbstractContextManager[str]],
    by_client: Callable[[str, list[Raw]], None],
    *,
    ports: tuple[int, int],
    count: int,
) -> list[Measurement]:
    near, far = (partial(target, port) for port in ports)
    return [
        *_against(site, name, goal, near, by_client, count=count),
        *_against(site, f"{name}_50_keys", goal, near, by_client, count=count, keys=_FEW_KEYS),
        *_against(site, f"{name}_5_ms", _FAR_GOAL, far, by_client, count=count),
    ]


def _against(
    site: Site,
    name: str,
    goal: float,
    target: Callable[[], AbstractContextManager[str]],
    by_client: Callable[[str, list[Raw]], None],
    *,
    count: int,
    keys: int = _KEYS,
) -> list[Measurement]:
    with site.place() as place:
        place.execute(_FILL.format(count=count, keys=keys))
        place.execute("VACUUM (ANALYZE) outbox_message")
        messages = _from_memory(count, keys)
        turns = Turns(name)
        for number in range(site.scale.rounds):
            with target() as ours, target() as other, in_a_process_of_its_own(NEW_OBJECTS):
                turns.add(_by_relay(place, ours, number, count), _rate(count, lambda: by_client(other, messages)))
    return [Measurement(name=name, goal=at_least(goal), unit="msg/s", ours=turns.ours, other=turns.other)]


def _by_relay(place: Place, url: str, number: int, count: int) -> float:
    relay = Relay(Outbox(place.engine), url, name=f"round-{number}")
    rate = _rate(count, relay.until_empty)
    relay.close()
    return rate


def _from_memory(count: int, keys: int) -> list[Raw]:
    headers = {"trace": "4bf92f3577b34da6", "Content-Type": "text/plain", "Outbox-Created-At": "2026-01-31T12:00:00Z"}
    return [
        Raw(
            key=f"order-{number % keys}",
            body=str(number).ljust(300, ".").encode(),
            headers=headers | {"Outbox-Id": str(uuid.uuid4()), "Outbox-Key": f"order-{number % keys}"},
        )
        for number in range(count)
    ]


def _keys_of(messages: list[Raw]) -> int:
    return len({message.key for message in messages})


def _rate(count: int, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return count / (time.perf_counter() - started)


async def _make_stream(url: str, name: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
    await client.close()


def _by_nats(url: str, messages: list[Raw]) -> None:
    asyncio.run(_publish(url, messages))


async def _publish(url: str, messages: list[Raw]) -> None:
    server, _, prefix = url.rpartition("/")
    client = await nats.connect(server)
    stream = client.jetstream(publish_async_max_pending=min(512, _keys_of(messages)))
    waiting = []
    for message in messages:
        headers = {**message.headers, "Nats-Msg-Id": message.headers["Outbox-Id"]}
        waiting.append(await stream.publish_async(f"{prefix}.orders", message.body, headers=headers))
    await asyncio.gather(*waiting)
    await client.close()


def _by_kafka(url: str, messages: list[Raw]) -> None:
    servers, _, prefix = url.removeprefix("kafka://").partition("/")
    failed = []

    def report(error: object, _record: object) -> None:
        if error is not None:
            failed.append(error)

    settings = {"bootstrap.servers": servers, "enable.idempotence": True, "partitioner": "murmur2_random"}
    producer = Producer({**settings, "queue.buffering.max.messages": max(100_000, len(messages))})
    for message in messages:
        headers: list[tuple[str, str | bytes | None]] = [
            (name, value.encode()) for name, value in message.headers.items() if name != "Outbox-Key"
        ]
        producer.produce(f"{prefix}.orders", message.body, message.key.encode(), headers=headers, on_delivery=report)
        producer.poll(0)
    if producer.flush(60) or failed:
        raise RuntimeError(f"{len(failed)} messages were not delivered")


def _by_redis(url: str, messages: list[Raw]) -> None:
    server, _, prefix = url.rpartition("/")
    client, at_once = redis.Redis.from_url(server), _keys_of(messages) < 500
    for start in range(0, len(messages), 500):
        pipeline = client.pipeline(transaction=at_once)
        for message in messages[start : start + 500]:
            pipeline.xadd(f"{prefix}:orders", {**message.headers, "Outbox-Body": message.body})  # type: ignore[dict-item]
        pipeline.execute()
    client.close()


async def _declare(url: str, name: str) -> None:
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange(name, aio_pika.ExchangeType.TOPIC, durable=True)
        queue = await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "quorum"})
        await queue.bind(exchange, "orders")


async def _delete(url: str, name: str) -> None:
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.queue_delete(name)
        await channel.exchange_delete(name)


def _by_rabbitmq(url: str, messages: list[Raw]) -> None:
    asyncio.run(_publish_to_exchange(url, messages))


async def _publish_to_exchange(url: str, messages: list[Raw]) -> None:
    server, _, name = url.partition("?exchange=")
    async with await aio_pika.connect(server) as connection:
        channel = await connection.channel(on_return_raises=True)
        exchange = await channel.get_exchange(name, ensure=False)

        async def publish(chain: Sequence[Raw]) -> None:
            for message in chain:
                headers = dict(message.headers)
                outgoing = aio_pika.Message(
                    message.body,
                    message_id=headers.pop("Outbox-Id"),
                    content_type=headers.pop("Content-Type"),
                    delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                    headers={**headers},
                )
                await exchange.publish(outgoing, "orders", mandatory=True)

        await asyncio.gather(*(publish(messages[number::_KEYS]) for number in range(_KEYS)))


def _by_webhook(url: str, messages: list[Raw]) -> None:
    asyncio.run(_post(url, messages))


async def _post(url: str, messages: list[Raw]) -> None:
    limits = Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
    shares: list[list[Raw]] = [[] for _ in range(_CONNECTIONS)]
    for number, message in enumerate(messages):
        shares[number % _KEYS % _CONNECTIONS].append(message)
    async with AsyncClient(limits=limits, trust_env=False) as client:

        async def post(share: Sequence[Raw]) -> None:
            for message in share:
                headers = {**message.headers, "webhook-timestamp": str(int(time.time()))}
                headers["webhook-id"] = headers.pop("Outbox-Id")
                response = await client.post(url, content=message.body, headers=headers)
                response.raise_for_status()

        await asyncio.gather(*map(post, shares))
