"""The order of check-back: the oldest transaction first, whoever says what became of it."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox import Outbox, create_engine
from outbox.schema import record_metadata
from outbox.store.half_messages.half import Way
from tests.rocketmq.parts import COMMIT, ROLLBACK, Listener, arrived, check_back, producer_of
from tests.support.leases import step_clock

#: Calls of the check service grow, so that so many transactions come in calls of several sizes.
NUMBER = 24
BODIES = [str(number) for number in range(NUMBER)]


@pytest.fixture
def business(tmp_path: Path) -> Iterator[Engine]:
    """A business database with records."""
    made = create_engine(f"sqlite:///{tmp_path / 'business.sqlite3'}")
    record_metadata().create_all(made)
    yield made
    made.dispose()


def begin(outbox: Outbox, business: Engine, *ways: Way) -> None:
    """Begin a transaction for each body, by these ways in turn, with one key for all; records say commit."""
    producer = producer_of(outbox, Listener(), business=business)
    for number, body in enumerate(BODIES):
        transaction = producer.begin_transaction(verdict=ways[number % len(ways)])
        transaction.send("orders", body, key="one")
        if transaction.verdict == "record":
            with business.begin() as connection:
                transaction.join(connection)
    producer.shutdown()


@pytest.mark.parametrize(
    "ways", [("listener",), ("record",), ("listener", "record"), ("record", "listener", "listener")]
)
def test_the_messages_of_a_key_come_out_as_their_transactions_began(outbox, business, ways):
    begin(outbox, business, *ways)

    check_back(outbox, COMMIT, business=business)

    assert arrived(outbox) == BODIES


def test_transactions_of_several_messages_come_out_whole_and_in_order(outbox, producer):
    expected = []
    for body in BODIES:
        transaction = producer.begin_transaction()
        for part in "ab":
            transaction.send("orders", body + part, key="one")
            expected.append(body + part)

    check_back(outbox, COMMIT)

    assert arrived(outbox) == expected


def test_the_listener_is_asked_about_the_oldest_first(outbox, business):
    """One question at a time, so that their order shows."""
    begin(outbox, business, "listener")

    asked = check_back(outbox, ROLLBACK, threads=1)

    assert [message.body.decode() for message in asked] == BODIES


def test_transactions_that_were_put_off_come_out_in_order(engine, outbox, business):
    """Nobody could be asked about them at first, so that they were parked for an hour."""
    begin(outbox, business, "listener")
    check_back(outbox, None)
    step_clock(engine, timedelta(hours=2), "outbox_parked.due_at")

    check_back(outbox, COMMIT)

    assert arrived(outbox) == BODIES
