"""What tests of RocketMQ's front share: a front that listens, clients of the official library, and bare calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import grpc
from sqlalchemy import text

from outbox import Outbox
from outbox.rocketmq.front import Front
from outbox.rocketmq.front.protocol import RPCS, SERVICE
from tests.support.waiting import eventually

TOPICS: Any = {"orders": "NORMAL", "steps": "FIFO", "later": "DELAY", "paid": "TRANSACTION", "paid1": "TRANSACTION"}


@contextmanager
def listening(outbox: Outbox, **options: Any) -> Iterator[Front]:
    """A front that listens at a port of its own until the end of the block."""
    with Front(outbox, **{"listen": "127.0.0.1:0", "topics": TOPICS} | options) as front:
        assert eventually(lambda: front.listening is not None)
        yield front


@contextmanager
def producing(
    client: ModuleType, front: Front, *topics: str, checker: Any = None, credentials: tuple[str, str] = ("", "")
) -> Iterator[Any]:
    """A producer of the official client, which has declared topics; `credentials`: access key and secret."""
    configuration = client.ClientConfiguration(str(front.listening), client.Credentials(*credentials))
    producer = client.Producer(configuration, list(topics), checker)
    producer.startup()
    try:
        yield producer
    finally:
        producer.shutdown()


@contextmanager
def consuming(
    client: ModuleType,
    front: Front,
    topics: dict[str, Any],
    *,
    group: str = "billing",
    seconds: int = 1,
    credentials: tuple[str, str] = ("", ""),
) -> Iterator[Any]:
    """A simple consumer of the official client, which waits so many seconds for messages."""
    configuration = client.ClientConfiguration(str(front.listening), client.Credentials(*credentials))
    consumer = client.SimpleConsumer(configuration, group, topics, seconds)
    consumer.startup()
    try:
        yield consumer
    finally:
        consumer.shutdown()


def called(front: Front, name: str, request: Any, *, seconds: float = 60) -> Any:
    """Return the answer to a call of the protocol, or all answers of a call that streams."""
    rpc = RPCS[name]
    with grpc.insecure_channel(str(front.listening)) as channel:
        make = channel.unary_stream if rpc.streams_out else channel.unary_unary
        call = make(f"/{SERVICE}/{name}", rpc.request.SerializeToString, rpc.response.FromString)
        answer = call(request, timeout=seconds, metadata=(("x-mq-client-id", "raw"),))
        return list(answer) if rpc.streams_out else answer


def bodies(outbox: Outbox, topic: str) -> list[bytes]:
    """The bodies of a topic in the log, in order."""
    with outbox.engine.connect() as connection:
        rows = connection.execute(
            text("SELECT body FROM outbox_message WHERE topic = :topic ORDER BY id"), {"topic": topic}
        )
        return [bytes(body) for (body,) in rows]
