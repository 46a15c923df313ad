"""An outbox, and a business whose transactions decide on half messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.model.verdict import Retry
from outbox.rocketmq import Transaction, TransactionMQProducer
from outbox.schema import record_metadata
from tests.rocketmq.parts import (
    HOUR,
    arrived,
    check_back,
    looked_at,
    producer_of,
)
from tests.support.orders import Base, customers

INSERT = text("INSERT INTO orders (customer) VALUES ('ann')")
UNDER_WAY = Retry("its business transaction is under way", HOUR, counts=False)


@dataclass
class Place:
    """An outbox, and a business whose transactions decide; for `record` in a database of its own."""

    outbox: Outbox
    business: Engine
    producer: TransactionMQProducer
    way: Any

    def begun(self, body: str = "1") -> Transaction:
        """A transaction with a message."""
        transaction = self.producer.begin_transaction(verdict=self.way)
        transaction.send("orders", body)
        return transaction

    def look(self, rows: Any) -> Any:
        """What a checker makes of them."""
        return looked_at(self.outbox, rows, business=self.business)

    def check(self) -> None:
        """Let the check service look."""
        check_back(self.outbox, business=self.business)

    def outcome(self) -> tuple[list[str], list[str]]:
        """What is durable of the business, and what was delivered, after everybody has looked."""
        self.check()
        return customers(self.business), arrived(self.outbox)


@contextmanager
def place_on(engine: Engine, way: str, business: Engine) -> Iterator[Place]:
    """An outbox with a business."""
    Base.metadata.create_all(business)
    if way == "record":
        record_metadata().create_all(business)
    outbox = Outbox(engine)
    producer = producer_of(outbox, business=business if way == "record" else None)
    yield Place(outbox, business, producer, way)
    producer.shutdown()
    outbox.close()
