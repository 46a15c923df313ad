"""What tests of transactions share: an outbox, and a producer whose listener says what a test wants."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.rocketmq import TransactionMQProducer
from tests.rocketmq.parts import Listener, producer_of


@pytest.fixture
def outbox(engine: Engine) -> Iterator[Outbox]:
    """An outbox on either database."""
    made = Outbox(engine)
    yield made
    made.close()


@pytest.fixture
def producer(outbox: Outbox) -> Iterator[TransactionMQProducer]:
    """A producer that does not check back by itself."""
    made = producer_of(outbox, Listener())
    yield made
    made.shutdown()
