"""What the model answers to a statement is what a database answers: the same pages, from the same window."""

import random
from typing import Any

from sqlalchemy import Engine, insert

from outbox.model.message import uuid7
from outbox.model.position import Position, Window
from outbox.store.database import Database
from outbox.store.log.log import Limits, Log
from outbox.store.operations.check import tables_of
from tests.model.reading import ListChannel
from tests.model.server import Row, Server

ROWS = 3


def test_a_page_of_the_list_is_a_page_of_the_log(pg_engine: Engine, full: bool) -> None:
    """Rows, reach and completeness, whatever was late and whatever fresh."""
    seed = random.randrange(1_000_000)
    chance = random.Random(seed)
    rows = a_log(pg_engine, chance)
    channel = Database(pg_engine).open()
    try:
        for _ in range(1000 if full else 100):
            window = Window(*sorted((a_position(chance), a_position(chance)), key=lambda position: position.head))
            assert pages(channel, window) == pages(ListChannel(Server(rows=rows)), window), f"seed {seed}: {window}"
    finally:
        channel.close()


def a_log(engine: Engine, chance: random.Random) -> tuple[Row, ...]:
    """Return rows of transactions that began in another order than they inserted; the same are in the database."""
    rows = tuple(Row(id, max(3, id - chance.choice((0, 0, 1, 4))), "k", 0) for id in range(1, 25))
    values = [
        {"id": row.id, "xact_id": row.xid, "message_id": uuid7(), "topic": "orders", "slot": 0, "body": b""}
        for row in rows
    ]
    with engine.begin() as connection:
        connection.execute(insert(tables_of(Database(engine)).message), values)
    return rows


def a_position(chance: random.Random) -> Position:
    """Return any position, also one that no server was ever at."""
    head = chance.randrange(3, 27)
    return Position.of(head, chance.sample(range(3, 27), chance.randrange(4)))


def pages(channel: Any, window: Window) -> list[object]:
    """Return what a reader gets that reads the window in pages, to the end."""
    log = Log(Limits(rows=ROWS))
    extent = log.extent(channel, window)
    found: list[object] = [extent, log.last(channel)]
    after = -1
    while after < extent.last:
        page = log.page(channel, window, extent, after, extent.last)
        ids = [row[0] for row in page.rows]
        found.append((ids, page.reached, page.complete))
        after = extent.last if page.complete or page.reached is None else page.reached
    return found
