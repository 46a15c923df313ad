"""What messages cost their writer, commit included, against the same rows inserted by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import psycopg
from sqlalchemy import Connection, insert, text
from sqlalchemy.engine import Engine

from benchmarks.keyed import insert_text, rows_by_hand, send_keyed
from benchmarks.measure import Goal, Measurement, Scale, Turns, at_most
from benchmarks.site import Site
from benchmarks.writers import BODY, ORDERS, row_by_hand
from outbox import Outbox, create_engine
from outbox.store.operations.check import tables_of

#: Transactions of one side before it is the turn of the other.
_BLOCK = 50

#: Appends the messages of one transaction, which has a number.
Append = Callable[[Connection, int], None]
#: Runs so many transactions, each with its number.
Writes = Callable[[range], None]


def write(site: Site) -> list[Measurement]:
    """One business INSERT and one keyless message, against SQLAlchemy's `insert()`: microseconds a transaction."""

    def sides(outbox: Outbox) -> tuple[Append, Append]:
        message = tables_of(outbox.database).message

        def send(connection: Connection, _number: int) -> None:
            outbox.send(connection, "orders", BODY)

        def insert_message(connection: Connection, _number: int) -> None:
            connection.execute(insert(message), row_by_hand())

        return send, insert_message

    return [_compared_on_core(site, "write", at_most(1.10), sides)]


def write_keyed(site: Site, messages: int) -> list[Measurement]:
    """One business INSERT and messages with a key and two headers, against SQL as text: microseconds a transaction."""

    def sides(outbox: Outbox) -> tuple[Append, Append]:
        statement = text(insert_text(messages, ":{}".format))

        def send(connection: Connection, number: int) -> None:
            send_keyed(outbox, connection, number, messages)

        def execute(connection: Connection, number: int) -> None:
            connection.execute(statement, rows_by_hand(number, messages))

        return send, execute

    return [_compared_on_core(site, f"write_keyed_{messages}", _goal(messages), sides)]


def write_psycopg(site: Site, messages: int) -> list[Measurement]:
    """The same on a connection of psycopg's own.

    Both sides have the same one: where the system runs a connection's process may cost it a third more, for as long as
    the connection lasts.
    """
    with site.place() as place:
        ORDERS.metadata.create_all(place.engine)
        outbox = Outbox(place.engine)
        statement = insert_text(messages, "%({})s".format)

        def send(connection: psycopg.Connection[Any], number: int) -> None:
            send_keyed(outbox, connection, number, messages)

        def execute(connection: psycopg.Connection[Any], number: int) -> None:
            connection.execute(statement.encode(), rows_by_hand(number, messages))

        with place.connect() as connection:
            sides = partial(_on_psycopg, connection, send), partial(_on_psycopg, connection, execute)
            return [compared(f"write_psycopg_{messages}", site.scale, _goal(messages), *sides)]


def _goal(messages: int) -> Goal:
    return at_most(1.10 if messages == 1 else 1.15)


def _compared_on_core(
    site: Site, name: str, goal: Goal, sides: Callable[[Outbox], tuple[Append, Append]]
) -> Measurement:
    """Each side on an engine of its own, because an outbox prepares the engine that it is given."""
    with site.place() as place:
        ORDERS.metadata.create_all(place.engine)
        by_hand = create_engine(place.url)
        ours, other = sides(Outbox(place.engine))
        writes = partial(on_core, place.engine, ours), partial(on_core, by_hand, other)
        measured = compared(name, site.scale, goal, *writes)
        by_hand.dispose()
    return measured


def on_core(engine: Engine, append: Append, numbers: range) -> None:
    for number in numbers:
        with engine.begin() as connection:
            connection.execute(insert(ORDERS), {"customer": "c-1", "total": number})
            append(connection, number)


def _on_psycopg(
    connection: psycopg.Connection[Any], append: Callable[[psycopg.Connection[Any], int], None], numbers: range
) -> None:
    for number in numbers:
        connection.execute("INSERT INTO orders (customer, total) VALUES (%s, %s)", ("c-1", number))
        append(connection, number)
        connection.commit()


def compared(name: str, scale: Scale, goal: Goal, ours: Writes, other: Writes) -> Measurement:
    """Microseconds a transaction, in short turns, so that whatever else the machine does meets both sides alike."""
    for side in (ours, other):
        side(range(scale.transactions // 10))
    turns = Turns(name)
    for _ in range(scale.rounds):
        blocks = [
            (_microseconds(ours, range(first, first + _BLOCK)), _microseconds(other, range(first, first + _BLOCK)))
            for first in range(0, scale.transactions, _BLOCK)
        ]
        turns.add(median(each for each, _ in blocks), median(each for _, each in blocks))
    return Measurement(name=name, goal=goal, unit="µs", ours=turns.ours, other=turns.other)


def _microseconds(side: Writes, numbers: range) -> float:
    started = time.perf_counter()
    side(numbers)
    return (time.perf_counter() - started) / len(numbers) * 1e6
