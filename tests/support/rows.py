"""Rows of the log without an outbox, and a handler that notes when they came."""

import time

from sqlalchemy import Connection, Engine, insert

from outbox.model.message import uuid7
from outbox.store.database import Database
from outbox.store.operations.check import tables_of
from tests.support.readers import Collector


def append(connection: Connection, *bodies: str, key: str | None = None) -> None:
    """Rows of the log in the transaction of `connection`."""
    rows = [{"message_id": uuid7(), "topic": "t", "key": key, "slot": 0, "body": body.encode()} for body in bodies]
    connection.execute(insert(tables_of(Database(connection.engine)).message), rows)


def write(engine: Engine, *bodies: str) -> None:
    """Rows of the log in a transaction of their own."""
    with engine.begin() as connection:
        append(connection, *bodies)


class Timed(Collector):
    """A handler that notes when each message came."""

    def __init__(self) -> None:
        super().__init__()
        self.came_at: dict[bytes, float] = {}

    def __call__(self, messages):
        """Done, all of them, now."""
        self.came_at.update((message.body, time.monotonic()) for message in messages)
        return super().__call__(messages)
