"""What the tests of the NATS sender share."""

from collections.abc import Iterator

import pytest

from outbox.senders.nats import NatsSender
from outbox.testing.proxy import TcpProxy
from outbox.testing.servers import NatsServer
from tests.support.nats_streams import Stream


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
