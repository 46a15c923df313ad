"""Destinations whose server may be killed: what they have confirmed is still there when the server comes back.

Each says how its server is started, where messages go, and how its consumer reads what arrived. A consumer is another
process, so `read` takes a text that says where.
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import aio_pika
import nats
import redis
import redis.sentinel
from aio_pika.abc import AbstractIncomingMessage, AbstractQueue
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from nats.js.api import AckPolicy, ConsumerConfig

from outbox import create_engine, migrate
from outbox.model.message import Message
from outbox.senders import aws_message as aws_wire
from outbox.senders import kafka as kafka_wire
from outbox.senders import nats as nats_wire
from outbox.senders import rabbitmq as rabbitmq_wire
from outbox.senders import redis as redis_wire
from outbox.senders import webhook_reading as webhook_wire
from outbox.store.database import Database
from outbox.testing.servers import NatsServer, PostgresServer
from tests.support.aws_program import read_journal
from tests.support.readers import delivered
from tests.support.servers.aws import ACCOUNT, REGION, AwsServer
from tests.support.servers.kafka import KafkaServer
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.servers.redis import RedisServer
from tests.support.servers.redis_cluster import RedisCluster, Watched
from tests.support.webhook_endpoint import read_file
from tests.support.webhooks import EndpointProgram

#: The one topic that is sent, and what stands before it where a destination has prefixes.
TOPIC, PREFIX = "orders", "shop"


class DurableDestination(ABC):
    """A destination with a server of its own, which is started already."""

    #: Whether what is sent again soon is there once.
    drops_copies: ClassVar[bool] = False

    #: Runs; `kill`, `start`, and the end of a `with` block say the rest.
    server: Any
    #: What `outbox relay --to` takes.
    url: str
    #: What `read` takes.
    source: str

    @staticmethod
    @abstractmethod
    def read(source: str) -> list[Message]:
        """Return every copy that is there, of each key in the order in which a consumer gets them."""


class JetStream(DurableDestination):
    """A stream in files. It knows each id for an hour: on a busy machine a relay may begin two minutes after a kill."""

    drops_copies = True

    def __init__(self) -> None:
        self.server = NatsServer().start()
        self.source = self.server.url
        self.url = f"{self.server.url}/{PREFIX}"
        asyncio.run(self._create())

    async def _create(self) -> None:
        async with await nats.connect(self.source) as client:
            await client.jetstream().add_stream(name=PREFIX, subjects=[f"{PREFIX}.>"], duplicate_window=3600)

    @staticmethod
    def read(source: str) -> list[Message]:
        """A consumer of the stream, from its first message on."""

        async def read() -> list[Message]:
            async with await nats.connect(source) as client:
                stream = client.jetstream()
                number = (await stream.stream_info(PREFIX)).state.messages
                consumer = await stream.add_consumer(PREFIX, ConsumerConfig(ack_policy=AckPolicy.NONE))
                reader = await stream.pull_subscribe_bind(consumer.name, stream=PREFIX)
                found: list[Message] = []
                while len(found) < number:
                    portion = await reader.fetch(min(500, number - len(found)), timeout=120)
                    found += [nats_wire.read_message(each, prefix=PREFIX) for each in portion]
                return found

        return asyncio.run(read())


class Kafka(DurableDestination):
    """Topics with three partitions, on one broker, which does not wait for the disk. `far`: see `KafkaServer`."""

    def __init__(self, *topics: str, far: tuple[int, int] | None = None) -> None:
        self.server = KafkaServer(far=far).start()
        self.source = self.server.servers
        self.url = f"{self.server.url}/{PREFIX}"
        admin = AdminClient({"bootstrap.servers": self.source})
        for future in admin.create_topics([NewTopic(f"{PREFIX}.{each}", 3, 1) for each in topics or [TOPIC]]).values():
            future.result(120)

    @staticmethod
    def read(source: str) -> list[Message]:
        """A consumer of all partitions of all topics, from their first records on."""
        consumer = Consumer({"bootstrap.servers": source, "group.id": "billing"})
        topics = [name for name in consumer.list_topics(timeout=120).topics if name.startswith(f"{PREFIX}.")]
        places = [TopicPartition(name, number, 0) for name in topics for number in range(3)]
        number = sum(consumer.get_watermark_offsets(each, timeout=120)[1] for each in places)
        consumer.assign(places)
        found: list[Message] = []
        until = time.monotonic() + 120
        while len(found) < number:
            assert time.monotonic() < until, f"{len(found)} of {number} records came"
            # A call waits for the whole time unless so many come.
            records = consumer.consume(1000, timeout=0.2)
            found += [kafka_wire.read_message(each, prefix=PREFIX) for each in records if each.error() is None]
        consumer.close()
        return found


class RabbitMQ(DurableDestination):
    """A quorum queue, bound to an exchange for every routing key."""

    def __init__(self) -> None:
        self.server = RabbitServer().start()
        self.source = self.server.url
        self.url = f"{self.server.url}?exchange={PREFIX}"
        asyncio.run(self._create())

    async def _create(self) -> None:
        async with await aio_pika.connect(self.source) as connection:
            channel = await connection.channel()
            exchange = await channel.declare_exchange(PREFIX, "topic", durable=True)
            queue = await channel.declare_queue(PREFIX, durable=True, arguments={"x-queue-type": "quorum"})
            await queue.bind(exchange, "#")

    @staticmethod
    def read(source: str) -> list[Message]:
        """A consumer that acknowledges nothing: it leaves the queue as it was, all of it in its order."""

        async def read() -> list[Message]:
            async with await aio_pika.connect(source) as connection:
                channel = await connection.channel()
                # Without a number, a quorum queue gives no more than 2 000 that are not acknowledged.
                await channel.set_qos(prefetch_count=65_535)
                queue = await channel.get_queue(PREFIX, ensure=False)
                mark = uuid.uuid4().hex
                await channel.default_exchange.publish(aio_pika.Message(b"", app_id=mark), PREFIX)
                async with asyncio.timeout(300):
                    return await _read_until(queue, mark)

        return asyncio.run(read())


async def _read_until(queue: AbstractQueue, mark: str) -> list[Message]:
    """Read up to the message that was put behind all others for this; no other reader sees it."""
    found: list[Message] = []
    is_over = asyncio.Event()

    async def take(received: AbstractIncomingMessage) -> None:
        if received.app_id is None:
            found.append(rabbitmq_wire.read_message(received))
            return
        await received.ack()
        if received.app_id == mark:
            is_over.set()

    await queue.consume(take)
    await is_over.wait()
    return found


class RedisStreams(DurableDestination):
    """A stream of a Redis that writes each command to its file before it answers."""

    def __init__(self) -> None:
        self.server = RedisServer(settings={"appendfsync": "always"}).start()
        self.source = self.server.url
        self.url = f"{self.server.url}/0/{PREFIX}"

    @staticmethod
    def read(source: str) -> list[Message]:
        """All entries."""
        with redis.Redis.from_url(source) as client:
            return _entries(client, PREFIX)


def _entries(client: Any, prefix: str) -> list[Message]:
    name = f"{prefix}:{TOPIC}"
    return [redis_wire.read_message(name, fields, prefix=prefix) for _, fields in client.xrange(name)]


class FailingOver:
    """A master of Redis with its replica: after a kill the replica is the master, with the dead one as its replica."""

    def __init__(self, servers: RedisCluster | Watched) -> None:
        self._servers = servers.__enter__()
        self._servers.begin_replica()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._servers.__exit__(*exception)

    def kill(self) -> None:
        """Kill the master."""
        self._servers.master.kill()

    def start(self) -> None:
        """Have the replica take over, and wait until it has a replica itself."""
        self._servers.fail_over()
        self._servers.begin_replica()


class ClusterOfRedis(DurableDestination):
    """A stream of a cluster, on the node with the replica, which has to have what is done."""

    #: Its streams have the same slot.
    _prefix = f"{{{PREFIX}}}"

    def __init__(self) -> None:
        cluster = RedisCluster()
        self.server = FailingOver(cluster)
        hosts = [f"127.0.0.1:{node.proxy.port}" for node in cluster.masters]
        self.source = f"redis://{hosts[-1]}"
        self.url = f"redis+cluster://{','.join(hosts)}/{self._prefix}?wait=1"
        assert cluster.owner(self._prefix) is cluster.master

    @staticmethod
    def read(source: str) -> list[Message]:
        """All entries, of the node that has them now."""
        with redis.RedisCluster.from_url(source) as client:
            return _entries(client, ClusterOfRedis._prefix)


class WatchedRedis(DurableDestination):
    """A stream of the master that sentinels know. Its replica has to have what is done."""

    def __init__(self) -> None:
        watched = Watched()
        self.server = FailingOver(watched)
        self.source = watched.hosts
        self.url = f"redis+sentinel://{watched.hosts}/mymaster/0/{PREFIX}?wait=1"

    @staticmethod
    def read(source: str) -> list[Message]:
        """All entries, of the master that the first sentinel knows, which decides."""
        host, _, port = source.partition(",")[0].partition(":")
        with redis.sentinel.Sentinel([(host, int(port))]).master_for("mymaster") as client:
            return _entries(client, PREFIX)


class Queue(DurableDestination):
    """A FIFO queue of SQS. The server of tests remembers what moto forgets."""

    drops_copies = True
    _scheme, _with_topic = "sqs", False

    def __init__(self) -> None:
        self.server = server = AwsServer().start()
        server.make(f"{PREFIX}-{TOPIC}.fifo", with_topic=self._with_topic)
        self.source = str(server.journal)
        self.url = f"{self._scheme}://{REGION}/{ACCOUNT}/{PREFIX}?fifo=1&endpoint={server.endpoint}"

    @staticmethod
    def read(source: str) -> list[Message]:
        """What the queue has taken."""
        return [aws_wire.read_message(each) for each in read_journal(Path(source))]


class Notifications(Queue):
    """A FIFO topic of SNS, and the same queue behind it."""

    _scheme, _with_topic = "sns", True


class Webhook(DurableDestination):
    """A program that answers when what it was sent is in its file."""

    def __init__(self) -> None:
        self.server = program = EndpointProgram()
        program.start()
        self.source = str(program.file)
        self.url = program.url

    @staticmethod
    def read(source: str) -> list[Message]:
        """What is in the file."""
        return [webhook_wire.read_message(each.headers, each.body) for each in read_file(Path(source))]


class OtherPostgres(DurableDestination):
    """The outbox of another database, whose server by default does not wait for the disk."""

    drops_copies = True

    def __init__(self) -> None:
        self.server = server = PostgresServer().start()
        self.source = server.create_database(PREFIX)
        self.url = self.source.replace("+psycopg", "")
        engine = create_engine(self.source)
        migrate.upgrade(engine)
        engine.dispose()

    @staticmethod
    def read(source: str) -> list[Message]:
        """What a relay of that outbox sends."""
        engine = create_engine(source)
        try:
            return delivered(Database(engine), name=f"reader-{uuid.uuid4().hex[:12]}")
        finally:
            engine.dispose()


KINDS: dict[str, type[DurableDestination]] = {
    "jetstream": JetStream,
    "kafka": Kafka,
    "rabbitmq": RabbitMQ,
    "redis": RedisStreams,
    "redis+cluster": ClusterOfRedis,
    "redis+sentinel": WatchedRedis,
    "sqs": Queue,
    "sns": Notifications,
    "webhook": Webhook,
    "postgresql": OtherPostgres,
}
