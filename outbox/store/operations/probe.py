"""Queries on a log for the test kit, which need no worker."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row
from sqlalchemy import select

from outbox.store.database import Channel, Database

_SEEN_INSIDE = "SELECT message_id FROM {message} WHERE message_id = ANY(%(ids)s)"
_NUMBERS = "SELECT id, {number} FROM {message}"
_EMPTY = "DELETE FROM {message}"
_DIRECT = "UPDATE {message} SET direct = :subscription WHERE topic = :topic"


def committed(database: Database, ids: Collection[UUID]) -> set[UUID]:
    """Return the ids of those messages that are committed, which every connection sees."""
    column = database.tables.message.c.message_id
    with database.engine.connect() as connection:
        return set(connection.scalars(select(column).where(column.in_(ids))))


def seen_inside(database: Database, driver: psycopg.Connection[Any], ids: Collection[UUID]) -> set[UUID]:
    """Return the ids of those messages that a psycopg connection sees inside its running transaction."""
    statement = database.sql(_SEEN_INSIDE).encode()
    with driver.cursor(row_factory=tuple_row) as cursor:
        return {row[0] for row in cursor.execute(statement, {"ids": list(ids)})}


def numbers(channel: Channel) -> dict[int, int]:
    """Return every id of the log, with the number that tells whether the row is settled."""
    return dict(channel.rows(_NUMBERS))


def count(channel: Channel, table: str) -> int:
    """Return how many rows a table has; `table` is its name without the prefix."""
    return int(channel.rows(channel.database.sql(f"SELECT count(*) FROM {{{table}}}"))[0][0])


def empty(channel: Channel) -> None:
    """Delete all rows of the log, as a purge may do in the end."""
    channel.run(_EMPTY)


def direct(channel: Channel, *, topic: str, subscription: str) -> None:
    """Mark the messages of a topic as those that their writer sends itself, for this subscription."""
    channel.run(_DIRECT, topic=topic, subscription=subscription)
