"""What the tests of senders share."""

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from outbox.senders.nats import NatsSender
from outbox.senders.rabbitmq import RabbitSender
from outbox.senders.webhook import WebhookSender
from outbox.testing.servers import NatsServer
from tests.conftest import started
from tests.support.kafka_topics import FarKafka
from tests.support.nats_streams import Stream
from tests.support.rabbit_exchanges import Exchange
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.servers.redis import RedisServer
from tests.support.webhook_endpoint import Endpoint
from tests.support.webhooks import Hook


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """A Redis server of this run; the names of streams are each test's own."""
    with started(RedisServer) as server:
        yield server


@pytest.fixture(scope="session")
def far_kafka() -> Iterator[FarKafka]:
    """A Kafka broker of this run, behind a proxy; the names of topics are each test's own."""
    with started(FarKafka) as kafka:
        yield kafka


@pytest.fixture
def kafka(far_kafka: FarKafka) -> Iterator[FarKafka]:
    """That broker; after the test its proxy lets everything pass again."""
    yield far_kafka
    far_kafka.proxy.pass_through()


@pytest.fixture
def stream(nats: NatsServer) -> Iterator[Stream]:
    """A stream of this test, behind a proxy of this test."""
    with TcpProxy("127.0.0.1", nats.port) as proxy:
        stream = Stream(nats, proxy)
        yield stream
        stream.close()


@pytest.fixture
def sender(stream: Stream) -> Iterator[NatsSender]:
    """A sender to that stream."""
    sender = stream.open()
    yield sender
    sender.close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """A web server of this test."""
    with Endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def hook(endpoint: Endpoint) -> Iterator[Hook]:
    """A path of that server, behind a proxy of this test."""
    with TcpProxy("127.0.0.1", endpoint.server_port) as proxy:
        yield Hook(endpoint, proxy)


@pytest.fixture
def exchange(rabbitmq: RabbitServer) -> Iterator[Exchange]:
    """An exchange of this test, behind a proxy of this test."""
    with TcpProxy("127.0.0.1", rabbitmq.port) as proxy:
        exchange = Exchange(rabbitmq, proxy)
        yield exchange
        exchange.close()


@pytest.fixture
def publisher(exchange: Exchange) -> Iterator[RabbitSender]:
    """A sender to that exchange."""
    publisher = exchange.open()
    yield publisher
    publisher.close()


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
