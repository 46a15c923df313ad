"""moto's SQS and SNS as a program that may be killed: each message that a queue takes is in a file before it answers.

moto itself forgets. Here a FIFO queue knows, also in a later life, which deduplication ids it has taken; unlike moto it
looks and takes under one lock, and forgets none after five minutes. Whoever starts the program makes queues and topics.
A queue holds few messages for those who receive, because moto looks at each one for every new one; the file has all.
"""

import json
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from moto.core.utils import camelcase_to_underscores
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.sns.models import Topic
from moto.sqs import models
from moto.sqs.models import Message, Queue
from werkzeug.serving import make_server

#: The messages that a queue holds.
MOST_HELD = 5


class Journal:
    """The messages that queues have taken, in their order."""

    def __init__(self, path: Path) -> None:
        self._taken = {(each["queue"], each["deduplication"]) for each in read_journal(path) if each["deduplication"]}
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._lock = threading.Lock()
        self._hold = Queue.add_message

    def take(self, queue: Queue, message: Message) -> None:
        """Stand in for `Queue.add_message`."""
        place = (queue.name, message.deduplication_id)
        with self._lock:
            if place in self._taken:
                return
            if message.deduplication_id is not None:
                self._taken.add(place)
            line = {
                "queue": queue.name,
                "group": message.group_id,
                "deduplication": message.deduplication_id,
                "Body": message.body,
                "MessageAttributes": message.message_attributes,
            }
            os.write(self._file, json.dumps(line).encode() + b"\n")
            if len(queue._messages) < MOST_HELD:
                self._hold(queue, message)


_publish = Topic.publish


def publish(topic: Topic, *arguments: Any, **more: Any) -> str:
    """Stand in for `Topic.publish`. A topic that is made anew would lose what comes before its subscription is."""
    if not topic.sns_backend.list_subscriptions_by_topic(topic_arn=topic.arn)[0]:
        raise LookupError(f"{topic.arn} has no subscription yet")
    return _publish(topic, *arguments, **more)


class Handler(MotoRequestHandler):
    """Answers in one packet, without a word."""

    wbufsize = -1
    disable_nagle_algorithm = True

    def log(self, type: str, message: str, *args: Any) -> None:
        """Say nothing."""


def read_journal(path: Path) -> list[dict[str, Any]]:
    """What is in such a file. The last line may be torn."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def main(port: int, path: Path) -> None:
    """Serve until the process ends."""
    journal = Journal(path)
    # The names of a queue's attributes, which are turned for each message.
    setattr(models, "camelcase_to_underscores", cache(camelcase_to_underscores))  # noqa: B010

    def take(queue: Queue, message: Message) -> None:
        journal.take(queue, message)

    setattr(Queue, "add_message", take)  # noqa: B010
    setattr(Topic, "publish", publish)  # noqa: B010
    app: Any = DomainDispatcherApplication(create_backend_app)
    make_server("127.0.0.1", port, app, threaded=True, request_handler=Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
