"""Rows as direct writers leave them, and workers of a compensation."""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine, insert, select

from outbox import Outbox, Relay
from outbox.model.message import uuid7
from outbox.model.subscription import Declaration, Subscription, compensation_of
from outbox.store.database import Database
from outbox.store.log.log import Limits
from outbox.store.operations.check import tables_of
from outbox.store.subscriptions.acks import Acks
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.settings import Settings
from tests.support.destination import LONG_LEASE, Destination
from tests.support.readers import Collector

BRIEFLY = timedelta(milliseconds=600)
BRISK = Settings(
    limits=Limits(rows=200),
    poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
    lease=LONG_LEASE,
    renew_every=timedelta(milliseconds=300),
)


def append(connection: Connection, *bodies: str, direct: str | None = "relay", key: str | None = None) -> list[int]:
    """Rows of the log in the transaction of `connection`; returns their places."""
    database = Database(connection.engine)
    message = tables_of(database).message
    rows = [
        {"message_id": uuid7(), "topic": "t", "key": key, "slot": 0, "body": body.encode(), "direct": direct}
        for body in bodies
    ]
    connection.execute(insert(message), rows)
    last = connection.execute(select(message.c.id).order_by(message.c.id.desc()).limit(1)).scalar_one()
    return list(range(last - len(bodies) + 1, last + 1))


def write(engine: Engine, *bodies: str, direct: str | None = "relay", key: str | None = None) -> list[int]:
    """Rows of the log in a transaction of their own."""
    with engine.begin() as connection:
        return append(connection, *bodies, direct=direct, key=key)


def acked(engine: Engine, ids: Sequence[int], subscription: str = "relay") -> None:
    """As a writer says that it has sent these."""
    database = Database(engine)
    with closing(database.open()) as channel:
        Acks(channel, subscription).insert("writer", ids)


def stored_acks(engine: Engine) -> list[list[int]]:
    """The ids of each ack that is there."""
    with engine.connect() as connection:
        ack = tables_of(Database(engine)).ack
        return [json.loads(listed) for (listed,) in connection.execute(select(ack.c.ids).order_by(ack.c.id))]


def declare_compensation(engine: Engine, grace: timedelta = BRIEFLY, name: str = "relay") -> Subscription:
    """As a direct writer does before its first row."""
    database = Database(engine)
    declared = Declaration(name=compensation_of(name), destination=None, kind="compensation", grace=grace)
    with closing(database.open()) as channel:
        return Subscriptions(channel).declare(declared, "latest")


class Timed(Collector):
    """A handler that notes when each message came."""

    def __init__(self) -> None:
        super().__init__()
        self.came_at: dict[bytes, float] = {}

    def __call__(self, messages):
        """Done, all of them, now."""
        self.came_at.update((message.body, time.monotonic()) for message in messages)
        return super().__call__(messages)


def relay_of(engine: Engine, destination: Destination, **options: Any) -> Relay:
    """A relay that loses no time."""
    return Relay(Outbox(engine), destination, **{"settings": BRISK, **options})
