"""A team of processes that write transactions by turns, as many business applications do at once."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection as Pipe
from typing import Any

from sqlalchemy import Column, Connection, Identity, Integer, MetaData, Table, Text, insert
from sqlalchemy.engine import Engine

from benchmarks.site import PROCESSES
from outbox import Message, Outbox, create_engine
from outbox.rocketmq import Transaction, TransactionMQProducer
from outbox.store.operations.check import tables_of

ORDERS = Table(
    "orders",
    MetaData(),
    Column("id", Integer, Identity(), primary_key=True),
    Column("customer", Text, nullable=False),
    Column("total", Integer, nullable=False),
)
BODY = b'{"customer": "c-1", "total": 42, "note": "' + b"x" * 256 + b'"}'

#: Processes, with a connection each.
WRITERS = 4
_PATIENCE = 60.0


def row_by_hand() -> dict[str, Any]:
    """A row of the log, as one would make it without this library."""
    return {
        "message_id": uuid.uuid4(),
        "topic": "orders",
        "key": None,
        "slot": random.randrange(256),
        "tags": None,
        "headers": None,
        "body": BODY,
        "content_type": None,
        "deliver_at": None,
        "expires_at": None,
    }


@dataclass(frozen=True, slots=True)
class Way:
    """A way of writing messages into a transaction.

    `prepare`: what is done for so many messages before their transaction begins.
    """

    engine: Engine
    append: Callable[[Connection, int], None]
    prepare: Callable[[int], None] | None = None


def send_all(url: str) -> Way:
    """With this library."""
    engine = create_engine(url)
    outbox = Outbox(engine)

    def append(connection: Connection, messages: int) -> None:
        outbox.send_all(connection, [Message("orders", BODY) for _ in range(messages)])

    return Way(engine, append)


def send_one(url: str) -> Way:
    """With this library, message by message."""
    engine = create_engine(url)
    outbox = Outbox(engine)

    def append(connection: Connection, messages: int) -> None:
        for _ in range(messages):
            outbox.send(connection, "orders", BODY)

    return Way(engine, append)


def co_located(url: str) -> Way:
    """With half messages, whose verdict is part of the business transaction."""
    engine = create_engine(url)
    producer = TransactionMQProducer("orders", Outbox(engine))
    begun: list[Transaction] = []

    def prepare(messages: int) -> None:
        transaction = producer.begin_transaction(verdict="join")
        for _ in range(messages):
            transaction.send("orders", BODY)
        begun.append(transaction)

    def append(connection: Connection, _messages: int) -> None:
        begun.pop().join(connection)

    return Way(engine, append, prepare=prepare)


def insert_by_hand(url: str) -> Way:
    """With SQLAlchemy Core."""
    engine = create_engine(url)
    table = tables_of(Outbox(create_engine(url)).database).message
    statement = insert(table)

    def append(connection: Connection, messages: int) -> None:
        rows = [row_by_hand() for _ in range(messages)]
        connection.execute(statement, rows if messages > 1 else rows[0])

    return Way(engine, append)


def transactions(way: Way, messages: int, seconds: float) -> float:
    """Write one order and its messages, again and again: transactions a second."""
    written, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        if way.prepare is not None:
            way.prepare(messages)
        with way.engine.begin() as connection:
            connection.execute(insert(ORDERS), {"customer": "c-1", "total": written})
            way.append(connection, messages)
        written += 1
    return written / (time.perf_counter() - started)


Make = Callable[[str], Way]


class Team:
    """Processes with a connection each; all of them do the same at the same time."""

    def __init__(self, pipes: Sequence[Pipe]) -> None:
        self._pipes = pipes

    def write(self, make: Make, messages: int, seconds: float) -> float:
        """Transactions a second of all together."""
        for pipe in self._pipes:
            pipe.send((make, messages, seconds))
        found: list[float] = []
        for pipe in self._pipes:
            if not pipe.poll(seconds + _PATIENCE):
                raise RuntimeError("a writer does not answer")
            found.append(pipe.recv())
        return sum(found)


@contextmanager
def team(url: str) -> Iterator[Team]:
    """Start the processes; they end with the block."""
    with ExitStack() as stack:
        pipes: list[Pipe] = []
        for _ in range(WRITERS):
            ours, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_write_as_told, args=(url, theirs), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            pipes.append(ours)
        yield Team(pipes)


def _write_as_told(url: str, pipe: Pipe) -> None:
    made = cache(lambda make: make(url))
    while True:
        make, messages, seconds = pipe.recv()
        pipe.send(transactions(made(make), messages, seconds))
