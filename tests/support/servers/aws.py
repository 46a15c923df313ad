"""A private SQS and SNS: moto in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config

from outbox.senders.aws import services
from outbox.testing.servers import LocalServer
from tests.support import aws_program
from tests.support.aws_program import read_journal

REGION, ACCOUNT = "eu-central-1", "123456789012"
#: What AWS's own chain finds, here and in processes begun here. The instance's metadata would be far away.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t/Sesame",
    "AWS_EC2_METADATA_DISABLED": "true",
}
os.environ.update(CREDENTIALS)


class AwsServer(LocalServer):
    """moto of this process alone. After a kill its queues, topics and subscriptions are made anew."""

    _stop_signals = (signal.SIGTERM,)

    def __init__(self) -> None:
        super().__init__("aws", None, None)
        self.journal = self.folder / "taken.jsonl"
        session = botocore.session.get_session()
        # The sender finds them read already: on a busy machine that takes a large part of a call's time.
        session.register_component("data_loader", services)
        config = Config(connect_timeout=60, read_timeout=60)
        self._clients: dict[str, Any] = {
            name: session.create_client(name, region_name=REGION, endpoint_url=self.endpoint, config=config)
            for name in ("sqs", "sns")
        }
        #: By name; whether there is also a topic that sends each message on to the queue.
        self._made: dict[str, bool] = {}

    @property
    def endpoint(self) -> str:
        """Where both services are."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def sqs(self) -> Any:
        """A client of SQS."""
        return self._clients["sqs"]

    @property
    def sns(self) -> Any:
        """A client of SNS."""
        return self._clients["sns"]

    def start(self) -> AwsServer:
        """Start, and make everything anew."""
        super().start()
        for name, with_topic in self._made.items():
            self._make(name, with_topic=with_topic)
        return self

    def make(self, *names: str, with_topic: bool = False) -> None:
        """Make queues, or topics with a queue of the same name behind each; FIFO if the name says so."""
        for name in names:
            self._made[name] = with_topic
            self._make(name, with_topic=with_topic)

    def remove(self, *names: str) -> None:
        """Remove queues, and the topics before them."""
        for name in names:
            if self._made.pop(name):
                self.sns.delete_topic(TopicArn=topic_arn(name))
            self.sqs.delete_queue(QueueUrl=self.queue_url(name))

    def queue_url(self, name: str) -> str:
        """The URL of a queue."""
        return f"{self.endpoint}/{ACCOUNT}/{name}"

    def taken(self, prefix: str) -> list[dict[str, Any]]:
        """What queues with such a prefix have ever taken, in their order."""
        return [each for each in read_journal(self.journal) if each["queue"].startswith(prefix)]

    def _make(self, name: str, *, with_topic: bool) -> None:
        fifo = name.endswith(".fifo")
        self.sqs.create_queue(QueueName=name, Attributes={"FifoQueue": "true"} if fifo else {})
        if with_topic:
            self.sns.create_topic(Name=name, Attributes={"FifoTopic": "true"} if fifo else {})
            self.sns.subscribe(
                TopicArn=topic_arn(name),
                Protocol="sqs",
                Endpoint=f"arn:aws:sqs:{REGION}:{ACCOUNT}:{name}",
                Attributes={"RawMessageDelivery": "true"},
            )

    def _command(self) -> Sequence[str | Path]:
        return [sys.executable, str(aws_program.__file__), str(self.port), self.journal]

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


def topic_arn(name: str) -> str:
    """The ARN of a topic."""
    return f"arn:aws:sns:{REGION}:{ACCOUNT}:{name}"
