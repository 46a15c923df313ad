"""A writer of a soak: it goes on whatever happens to the database. Run with a JSON object, the fields of `Task`."""

from __future__ import annotations

import json
import random
import sys
import time

from sqlalchemy.exc import DBAPIError

from outbox import create_engine
from tests.scenarios.exactness.writers import Task, Writer

#: The topics, one of each writer: so a destination that has a topic has all of each unit of order.
TOPICS = ("orders", "mails", "stock", "bills")
KEYS = 60
_LONG_SHARE, _LONG_SECONDS = 0.01, 2.0
_PAUSE_SECONDS = 0.1
_AGAIN_SECONDS = 0.3


def topic_of(name: str) -> str:
    """The topic of a message."""
    return TOPICS[int(name.partition("-")[0]) % len(TOPICS)]


def main(url: str, number: int) -> None:
    """Write until killed. What it writes has other names after each start."""
    start = time.monotonic_ns() * len(TOPICS) + number
    task = Task(url=url, number=start, quota=0, enough="", keys=KEYS, seed=start, topics=(TOPICS[number],))
    writer = Writer(task, create_engine(url))
    while True:
        try:
            writer.transaction(_LONG_SECONDS if random.random() < _LONG_SHARE else 0.0)
            time.sleep(random.uniform(0, _PAUSE_SECONDS))
        except DBAPIError as error:
            print(f"{time.monotonic():.2f} {type(error).__name__}: {str(error)[:200]}", flush=True)
            time.sleep(_AGAIN_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
