"""How fast a relay moves messages to a real destination, against the destination's own client, fed from memory.

The client's side has ids, headers and confirmations as well, and as much under way as it likes.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import nats
import redis
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from nats.js.api import StreamConfig

from benchmarks.measure import Measurement, Turns, at_least
from benchmarks.site import Place, Site
from outbox import Outbox, Relay
from outbox.testing.servers import KafkaServer, NatsServer, RedisServer

_KEYS = 1_000
_FILL = f"""
    INSERT INTO outbox_message (message_id, topic, key, slot, body, content_type, headers)
    SELECT gen_random_uuid(), 'orders', 'order-' || i % {_KEYS}, i % {_KEYS} % 256,
           convert_to(rpad(i::text, 300, '.'), 'UTF8'), 'text/plain', '{{{{"trace": "4bf92f3577b34da6"}}}}'
    FROM generate_series(1, {{count}}) AS i
"""


@dataclass(frozen=True, slots=True)
class Raw:
    """A message as a program has it in memory that needs no outbox."""

    key: str
    body: bytes
    headers: dict[str, str]


def nats_vs_raw(site: Site) -> list[Measurement]:
    """Messages a second into a stream of JetStream, against nats-py."""
    with NatsServer() as server:

        @contextmanager
        def target() -> Iterator[str]:
            name = f"s{uuid.uuid4().hex}"
            asyncio.run(_make_stream(server.url, name))
            yield f"{server.url}/{name}"

        return _against(site, "nats_vs_raw", 0.8, target, _by_nats)


def kafka_vs_raw(site: Site) -> list[Measurement]:
    """Messages a second into a topic of Kafka, against an idempotent producer of confluent-kafka."""
    with KafkaServer() as server:

        @contextmanager
        def target() -> Iterator[str]:
            name = f"s{uuid.uuid4().hex}"
            admin = AdminClient({"bootstrap.servers": server.servers})
            for future in admin.create_topics([NewTopic(f"{name}.orders", 3, 1)]).values():
                future.result(10)
            yield f"{server.url}/{name}"

        return _against(site, "kafka_vs_raw", 0.7, target, _by_kafka)


def redis_vs_raw(site: Site) -> list[Measurement]:
    """Messages a second into a stream of Redis, against redis-py with pipelines."""
    with RedisServer() as server:

        @contextmanager
        def target() -> Iterator[str]:
            yield f"{server.url}/0/s{uuid.uuid4().hex}"

        return _against(site, "redis_vs_raw", 0.7, target, _by_redis)


def _against(
    site: Site,
    name: str,
    goal: float,
    target: Callable[[], AbstractContextManager[str]],
    by_client: Callable[[str, list[Raw]], None],
) -> list[Measurement]:
    count = site.scale.sent
    with site.place() as place:
        place.execute(_FILL.format(count=count))
        place.execute("VACUUM (ANALYZE) outbox_message")
        messages = _from_memory(count)
        turns = Turns(name)
        for number in range(site.scale.rounds):
            with target() as ours, target() as other:
                turns.add(_by_relay(place, ours, number, count), _rate(count, lambda: by_client(other, messages)))
    return [Measurement(name=name, goal=at_least(goal), unit="msg/s", ours=turns.ours, other=turns.other)]


def _by_relay(place: Place, url: str, number: int, count: int) -> float:
    relay = Relay(Outbox(place.engine), url, name=f"round-{number}")
    rate = _rate(count, relay.until_empty)
    relay.close()
    return rate


def _from_memory(count: int) -> list[Raw]:
    headers = {"trace": "4bf92f3577b34da6", "Content-Type": "text/plain", "Outbox-Created-At": "2026-01-31T12:00:00Z"}
    return [
        Raw(
            key=f"order-{number % _KEYS}",
            body=str(number).ljust(300, ".").encode(),
            headers=headers | {"Outbox-Id": str(uuid.uuid4()), "Outbox-Key": f"order-{number % _KEYS}"},
        )
        for number in range(count)
    ]


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
    stream = client.jetstream(publish_async_max_pending=512)
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
    producer = Producer(settings)
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
    client = redis.Redis.from_url(server)
    for start in range(0, len(messages), 500):
        pipeline = client.pipeline(transaction=False)
        for message in messages[start : start + 500]:
            pipeline.xadd(f"{prefix}:orders", {**message.headers, "Outbox-Body": message.body})  # type: ignore[dict-item]
        pipeline.execute()
    client.close()
