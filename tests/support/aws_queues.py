"""Queues of SQS, and topics of SNS with a queue behind each, for tests."""

import uuid
from typing import Any, ClassVar
from uuid import UUID

from outbox.senders.aws import SnsSender, SqsSender
from outbox.senders.aws_message import read_message
from outbox.testing.sender_contract import TOPICS, Stored
from tests.support.remote import Place, stored_of
from tests.support.servers.aws import ACCOUNT, REGION, AwsServer
from tests.support.servers.proxy import TcpProxy


class Queues(Place):
    """Queues with a prefix of their own, reached through a proxy."""

    takes_any_topic = False
    deadline, seconds = 15.0, 6.0
    #: For a call of thousands of messages: moto is slow.
    patience = 120.0
    sender: Any = SqsSender
    scheme: ClassVar[str] = "sqs"
    fifo: ClassVar[bool] = False
    with_topic: ClassVar[bool] = False

    def __init__(self, server: AwsServer, proxy: TcpProxy) -> None:
        super().__init__(proxy)
        self.server = server
        self.prefix = f"p{uuid.uuid4().hex[:12]}"
        self.endpoint = f"http://127.0.0.1:{proxy.port}"
        fifo = "&fifo=1" if self.fifo else ""
        self.url = f"{self.scheme}://{REGION}/{ACCOUNT}/{self.prefix}?endpoint={self.endpoint}{fifo}"
        self._names = {topic: f"{self.prefix}-{topic}{'.fifo' * self.fifo}" for topic in (*TOPICS, "orders")}
        server.make(*self._names.values(), with_topic=self.with_topic)

    def name(self, topic: str) -> str:
        """The name of a queue."""
        return self._names[topic]

    def taken(self) -> list[dict[str, Any]]:
        """What they have taken, in order."""
        found: list[dict[str, Any]] = self.server.taken(self.prefix)
        return found

    def stored(self) -> list[Stored]:
        """The same as a consumer of an outbox reads it."""
        return [stored_of(read_message(each)) for each in self.taken()]

    def raw(self) -> list[tuple[UUID, object]]:
        """All that they have of each message."""
        return [(read_message(each).message_id, each) for each in self.taken()]

    def fail(self, topic: str) -> None:
        """Its queue is gone."""
        self.server.remove(self._names.pop(topic))

    def close(self) -> None:
        """Remove them."""
        self.server.remove(*self._names.values())


class FifoQueues(Queues):
    """The same with FIFO queues, which drop second copies."""

    fifo = True


class Topics(Queues):
    """Topics, each with a queue behind it."""

    sender = SnsSender
    scheme = "sns"
    with_topic = True


class FifoTopics(Topics):
    """FIFO topics, each with a FIFO queue behind it."""

    fifo = True
