"""What tests of RocketMQ's front share: a front that listens, and a producer of the official client."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from outbox import Outbox
from outbox.rocketmq.front import Front
from tests.support.waiting import eventually

TOPICS: Any = {"orders": "NORMAL", "steps": "FIFO", "later": "DELAY", "paid": "TRANSACTION", "paid1": "TRANSACTION"}


@contextmanager
def listening(outbox: Outbox, **options: Any) -> Iterator[Front]:
    """A front that listens at a port of its own until the end of the block."""
    with Front(outbox, **{"listen": "127.0.0.1:0", "topics": TOPICS} | options) as front:
        assert eventually(lambda: front.listening is not None)
        yield front


@contextmanager
def producing(client: ModuleType, front: Front, *topics: str, checker: Any = None) -> Iterator[Any]:
    """A producer of the official client, which has declared topics."""
    configuration = client.ClientConfiguration(str(front.listening), client.Credentials())
    producer = client.Producer(configuration, list(topics), checker)
    producer.startup()
    try:
        yield producer
    finally:
        producer.shutdown()
