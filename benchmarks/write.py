"""What a message costs its writer, against the same INSERT written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from sqlalchemy import Connection, insert
from sqlalchemy.engine import Engine

from benchmarks.measure import Measurement, Turns, at_most
from benchmarks.site import Site
from benchmarks.writers import BODY, ORDERS, row_by_hand
from outbox import Outbox, create_engine

#: Transactions of one side before it is the turn of the other.
_BLOCK = 50


def write(site: Site) -> list[Measurement]:
    """One business INSERT and one keyless message, commit included: microseconds a transaction."""
    with site.place() as place:
        ORDERS.metadata.create_all(place.engine)
        by_hand = create_engine(place.url)
        outbox = Outbox(place.engine)
        message = outbox.database.tables.message

        def send(connection: Connection) -> None:
            outbox.send(connection, "orders", BODY)

        def insert_message(connection: Connection) -> None:
            connection.execute(insert(message), row_by_hand())

        for engine, append in ((place.engine, send), (by_hand, insert_message)):
            _microseconds(engine, append, site.scale.transactions // 10)
        turns = Turns("write")
        for _ in range(site.scale.rounds):
            # Short turns, so that whatever else the machine does meets both sides alike.
            blocks = [
                (_microseconds(place.engine, send, _BLOCK), _microseconds(by_hand, insert_message, _BLOCK))
                for _ in range(site.scale.transactions // _BLOCK)
            ]
            turns.add(median(ours for ours, _ in blocks), median(other for _, other in blocks))
        by_hand.dispose()
    return [Measurement(name="write", goal=at_most(1.10), unit="µs", ours=turns.ours, other=turns.other)]


def _microseconds(engine: Engine, append: Callable[[Connection], None], transactions: int) -> float:
    started = time.perf_counter()
    for number in range(transactions):
        with engine.begin() as connection:
            connection.execute(insert(ORDERS), {"customer": "c-1", "total": number})
            append(connection)
    return (time.perf_counter() - started) / transactions * 1e6
