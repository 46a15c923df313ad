"""Topics of a Kafka broker for tests."""

import functools
import time
import uuid
from collections.abc import Mapping
from typing import Any, Self
from uuid import UUID

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from outbox.senders.kafka import KafkaSender, read_message
from outbox.testing.sender_contract import TOPICS, Stored
from outbox.testing.servers.process import free_port
from tests.support.remote import Place, stored_of
from tests.support.servers.kafka import KafkaServer
from tests.support.servers.proxy import TcpProxy
from tests.support.waiting import eventually

#: A broker on a busy machine may need minutes for what takes it milliseconds otherwise.
PATIENCE = 120.0


class FarKafka:
    """A broker that tells its clients the address of a proxy, so that all they say passes through there."""

    def __init__(self, settings: Mapping[str, str] | None = None, **more: Any) -> None:
        """Take a broker's settings, and what else `KafkaServer` takes."""
        port = free_port()
        # The broker tells the time in milliseconds, and `Topics.records` tells by it which record came first.
        self.proxy = TcpProxy("127.0.0.1", port, latency=0.002)
        self.server = KafkaServer(settings=settings or {}, far=(port, self.proxy.port), **more)

    def __enter__(self) -> Self:
        self.proxy.__enter__()
        self.server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.close()
        self.proxy.__exit__()


class Topics(Place):
    """The topics behind a prefix of their own, reached through a proxy."""

    sender = KafkaSender
    takes_any_topic = False

    def __init__(self, kafka: FarKafka) -> None:
        super().__init__(kafka.proxy)
        self.server = kafka.server
        self.prefix = f"p{uuid.uuid4().hex[:12]}"
        self.url = f"kafka://127.0.0.1:{kafka.proxy.port}/{self.prefix}"
        self._servers = kafka.server.servers
        self._admin = AdminClient({"bootstrap.servers": self._servers})
        #: What was read so far, by topic and partition, and by offset.
        self._read: dict[tuple[str, int], dict[int, Message]] = {}
        self._consumer = Consumer({"bootstrap.servers": self._servers, "group.id": self.prefix})
        self.make(*TOPICS)

    def make(self, *topics: str, partitions: int = 3, **settings: str) -> None:
        """Create topics; `settings` are theirs, with _ in place of dots."""
        config = {name.replace("_", "."): value for name, value in settings.items()}
        config["message.timestamp.type"] = "LogAppendTime"
        wanted = [NewTopic(f"{self.prefix}.{topic}", partitions, 1, config=config) for topic in topics]
        for future in self._admin.create_topics(wanted, request_timeout=PATIENCE).values():
            future.result(PATIENCE)
        for each in wanted:
            assert eventually(functools.partial(self._is_there, each.topic), PATIENCE)

    def allow(self, topic: str, user: str) -> None:
        """Let a user write to a topic, where the broker asks."""
        rights = [AclOperation.WRITE, AclOperation.DESCRIBE]
        name, anywhere = f"{self.prefix}.{topic}", (ResourcePatternType.LITERAL, f"User:{user}", "*")
        wanted = [AclBinding(ResourceType.TOPIC, name, *anywhere, each, AclPermissionType.ALLOW) for each in rights]
        for future in self._admin.create_acls(wanted, request_timeout=PATIENCE).values():
            future.result(PATIENCE)
        # The broker learns of them a moment after they are stored.
        stored = AclBindingFilter(ResourceType.TOPIC, name, *anywhere, AclOperation.ANY, AclPermissionType.ALLOW)
        assert eventually(lambda: len(self._admin.describe_acls(stored).result(PATIENCE)) == len(wanted), PATIENCE)

    def records(self) -> list[Message]:
        """Every record that is there, in the order of arrival as far as the broker tells it."""
        found = self._admin.list_topics(timeout=PATIENCE).topics
        places = [
            TopicPartition(name, number)
            for name, topic in found.items()
            if name.startswith(f"{self.prefix}.")
            for number in topic.partitions
        ]
        left = 0
        for each in places:
            known = self._read.setdefault((each.topic, each.partition), {})
            each.offset = max(known, default=-1) + 1
            left += self._end(each) - each.offset
        self._consumer.assign(places)
        until = time.monotonic() + PATIENCE
        while left > 0 and time.monotonic() < until:
            for record in self._consumer.consume(min(left, 1_000), timeout=0.2):
                known = self._read[str(record.topic()), record.partition() or 0]
                # The client reads some twice after a broker was away for a moment.
                if record.error() is None and record.offset() not in known:
                    known[record.offset() or 0] = record
                    left -= 1
        self._consumer.unassign()
        assert left == 0, f"{left} records were not read"
        read = [record for each in places for record in self._read[each.topic, each.partition].values()]
        return sorted(read, key=lambda record: record.timestamp()[1])

    def _end(self, place: TopicPartition) -> int:
        """The number of records of a partition; a new one has no leader for a moment."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self._consumer.get_watermark_offsets(place, timeout=PATIENCE)[1]
            except KafkaException as error:
                if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION or time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def committed(self, topic: str) -> list[Message]:
        """What a consumer sees that reads only what was committed, each partition in its order."""
        settings = {"isolation.level": "read_committed", "enable.partition.eof": True}
        consumer = Consumer({"bootstrap.servers": self._servers, "group.id": self.prefix, **settings})
        name = f"{self.prefix}.{topic}"
        partitions = self._admin.list_topics(name, PATIENCE).topics[name].partitions
        places = [TopicPartition(name, number, 0) for number in partitions]
        consumer.assign(places)
        records: list[Message] = []
        ends = 0
        while ends < len(places):
            each = consumer.poll(PATIENCE)
            assert each is not None
            error = each.error()
            if error is None:
                records.append(each)
                continue
            assert error.code() == KafkaError._PARTITION_EOF
            ends += 1
        consumer.close()
        return records

    def stored(self) -> list[Stored]:
        """The same as a consumer of an outbox reads it."""
        return [stored_of(read_message(record, prefix=self.prefix)) for record in self.records()]

    def raw(self) -> list[tuple[UUID, object]]:
        """The topic, key, headers and value of every record."""
        return [
            (stored_of(read_message(each, prefix=self.prefix)).message_id,
             (each.topic(), each.key(), each.headers(), each.value()))
            for each in self.records()
        ]  # fmt: skip

    def fail(self, topic: str) -> None:
        """Remove the topic."""
        name = f"{self.prefix}.{topic}"
        for future in self._admin.delete_topics([name], request_timeout=PATIENCE).values():
            future.result(PATIENCE)
        assert eventually(lambda: not self._is_there(name), PATIENCE)

    def close(self) -> None:
        """Leave the topics behind, which are nobody else's, and make the proxy pass everything on."""
        self.recover()
        self._consumer.close()

    def _is_there(self, name: str) -> bool:
        """Whether a broker knows the topic: it answers before all of it does."""
        found = self._admin.list_topics(timeout=PATIENCE).topics.get(name)
        return found is not None and all(each.leader >= 0 for each in found.partitions.values())
