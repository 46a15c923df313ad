"""What a message costs its writer, against the same INSERT written by hand."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable

from sqlalchemy import Column, Connection, Identity, Integer, MetaData, Table, Text, insert
from sqlalchemy.engine import Engine

from benchmarks.measure import Measurement, Turns, at_most
from benchmarks.site import Site
from outbox import Outbox, create_engine

ORDERS = Table(
    "orders",
    MetaData(),
    Column("id", Integer, Identity(), primary_key=True),
    Column("customer", Text, nullable=False),
    Column("total", Integer, nullable=False),
)
_BODY = b'{"customer": "c-1", "total": 42, "note": "' + b"x" * 256 + b'"}'


def write(site: Site) -> list[Measurement]:
    """One business INSERT and one keyless message, commit included: microseconds a transaction."""
    with site.place() as place:
        ORDERS.metadata.create_all(place.engine)
        by_hand = create_engine(place.url)
        outbox = Outbox(place.engine)
        message = outbox.database.tables.message

        def send(connection: Connection) -> None:
            outbox.send(connection, "orders", _BODY)

        def insert_message(connection: Connection) -> None:
            connection.execute(
                insert(message),
                {
                    "message_id": uuid.uuid4(),
                    "topic": "orders",
                    "key": None,
                    "slot": random.randrange(256),
                    "tags": None,
                    "headers": None,
                    "body": _BODY,
                    "content_type": None,
                    "deliver_at": None,
                    "expires_at": None,
                },
            )

        for engine, append in ((place.engine, send), (by_hand, insert_message)):
            _microseconds(engine, append, site.scale.transactions // 10)
        turns = Turns("write").take(
            2 * site.scale.rounds - 1,
            lambda: _microseconds(place.engine, send, site.scale.transactions),
            lambda: _microseconds(by_hand, insert_message, site.scale.transactions),
        )
        by_hand.dispose()
    return [Measurement(name="write", goal=at_most(1.10), unit="µs", ours=turns.ours, other=turns.other)]


def _microseconds(engine: Engine, append: Callable[[Connection], None], transactions: int) -> float:
    started = time.perf_counter()
    for number in range(transactions):
        with engine.begin() as connection:
            connection.execute(insert(ORDERS), {"customer": "c-1", "total": number})
            append(connection)
    return (time.perf_counter() - started) / transactions * 1e6
