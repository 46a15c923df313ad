"""What the tests of senders share."""

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from outbox.senders import remote
from outbox.senders.webhook import WebhookSender
from tests.support import aws_queues
from tests.support.kafka_topics import FarKafka, Topics
from tests.support.nats_streams import Stream
from tests.support.other_outbox import OtherOutbox
from tests.support.places import begun, opened, placed
from tests.support.rabbit_exchanges import Exchange
from tests.support.redis_streams import Streams
from tests.support.servers.aws import AwsServer
from tests.support.servers.redis import RedisServer
from tests.support.webhook_endpoint import Endpoint
from tests.support.webhooks import Hook

redis = begun(RedisServer, "session")
aws = begun(AwsServer, "session")
#: A broker of this run; the names of topics are each test's own.
far_kafka = begun(FarKafka, "session")
stream = placed(Stream, "nats")
streams = placed(Streams, "redis")
topics = placed(Topics, "kafka", port=None)
queues, fifo_queues = placed(aws_queues.Queues, "aws"), placed(aws_queues.FifoQueues, "aws")
sns_topics, fifo_topics = placed(aws_queues.Topics, "aws"), placed(aws_queues.FifoTopics, "aws")
exchange = placed(Exchange, "rabbitmq")
publisher = opened("exchange")
other = placed(OtherOutbox, "pg_engine", port="url.port")
hook = placed(Hook, "endpoint", port="server_port")
sender = opened("stream")


@pytest.fixture
def kafka(far_kafka: FarKafka) -> Iterator[FarKafka]:
    """That broker; after the test its proxy lets everything pass again."""
    yield far_kafka
    far_kafka.proxy.pass_through()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A web server of this test."""
    with Endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call ends by itself after a tenth of its time: its loop is not taken for stuck on a busy machine."""
    monkeypatch.setattr(remote, "_SHARE", 0.1)


@pytest.fixture
def to_webhook() -> Iterator[Callable[..., WebhookSender]]:
    """Opens senders to webhooks, and closes them in the end."""
    opened: list[WebhookSender] = []

    def open_one(url: str, *, seconds: float = 5.0) -> WebhookSender:
        opened.append(WebhookSender(url, timeout=timedelta(seconds=seconds)))
        return opened[-1]

    yield open_one
    for sender in opened:
        sender.close()
