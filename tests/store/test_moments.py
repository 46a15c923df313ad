"""A moment as the beginning of a subscription: the place in the log before each message of that moment or later."""

import logging
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, insert

from outbox import Outbox
from outbox.model.message import uuid7
from outbox.store.database import Database
from outbox.store.log.log import last_id_before
from outbox.store.operations.check import tables_of

_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


def written_at(engine: Engine, *minutes: float) -> None:
    """Messages with the ids 1, 2, 3 …, written at these moments by the clock of the database."""
    values = [
        {
            "message_id": uuid7(), "topic": "orders", "slot": 0, "body": b"",
            "created_at": _BEGINNING + timedelta(minutes=minute),
        }
        for minute in minutes
    ]  # fmt: skip
    with engine.begin() as connection:
        connection.execute(insert(tables_of(Database(engine)).message), values)


def last_before(engine: Engine, minute: float) -> int:
    """The last id before the messages of a moment and later."""
    with closing(Outbox(engine).database.open()) as channel:
        return last_id_before(channel, _BEGINNING + timedelta(minutes=minute))


#: Minutes of a clock that was an hour ahead for a while: a few messages long, and thousands long and thousands ago.
SHORTLY = [*range(20), *range(80, 100), *range(20, 90)]
LONG = [*range(500), *range(20_000, 21_000), *range(500, 22_000)]


@pytest.mark.parametrize(
    ("minutes", "moment", "last", "warned"),
    [(SHORTLY, 80, 20, True), (SHORTLY, 15, 15, False), (LONG, 20_500, 1_000, True)],
)
def test_a_clock_that_was_ahead_hides_no_message_of_a_moment(engine, caplog, minutes, moment, last, warned):
    """A search by halves takes the moments for rising: it may come to a place behind such messages."""
    written_at(engine, *minutes)

    found = last_before(engine, moment)
    logged = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]

    assert (found, ["has stepped" in each for each in logged]) == (last, [True] * warned)


def test_messages_of_a_rising_clock_are_found_by_halves(engine, caplog):
    written_at(engine, *range(0, 5_000, 7))

    found = [last_before(engine, moment) for moment in (-1, 0, 1, 7, 700, 9_000)]

    assert (found, caplog.records) == ([0, 0, 1, 1, 100, 715], [])
