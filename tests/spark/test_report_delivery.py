"""The delivery report counts what was written and parked."""

from datetime import UTC, datetime, timedelta

import pytest

from outbox.model.limits import HALF_TOPIC
from outbox.spark.reports import delivery

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def at(minutes: float) -> datetime:
    return NOON + minutes * MINUTE


def rows(frame):
    """All rows as values, in the order of the frame."""
    return [tuple(row.values()) for row in frame.toArrow().to_pylist()]


@pytest.fixture
def messages(spark):
    """Makes messages of (topic, minute)."""

    def made(*given):
        return spark.createDataFrame([(topic, at(minute)) for topic, minute in given], delivery.PER_HOUR_COLUMNS)

    return made


@pytest.fixture
def parked(spark):
    """Makes parked messages of (subscription, state, topic, minutes ago, error)."""

    def made(*given):
        data = [(name, state, topic, at(-ago), error) for name, state, topic, ago, error in given]
        return spark.createDataFrame(
            data, "subscription string, state string, topic string, parked_at timestamp, error string"
        )

    return made


@pytest.mark.jvm
def test_messages_are_counted_by_topic_and_hour_without_half_messages(messages):
    log = messages(("orders", 0), ("orders", 59), ("orders", 60), ("mail", 61), (HALF_TOPIC, 61), ("mail", 200))

    assert rows(delivery.messages_per_hour(log)) == [
        ("orders", at(0), 2), ("mail", at(60), 1), ("orders", at(60), 1), ("mail", at(180), 1),
    ]  # fmt: skip


@pytest.mark.jvm
def test_parked_messages_are_counted_by_state_and_age(parked):
    found = delivery.parked_by_age(
        parked(
            ("relay", "retry", "orders", 0.5, "x"), ("relay", "retry", "orders", 2, "x"),
            ("relay", "retry", "mail", 59, "x"), ("relay", "dead", "orders", 60, "x"),
            ("relay", "dead", "orders", 60 * 24 * 8, "x"), ("audit", "delayed", "orders", 60 * 24 * 3, None),
        ),
        NOON,
    )  # fmt: skip

    assert rows(found) == [
        ("audit", "delayed", "< 7 d", 1, at(-60 * 24 * 3)),
        ("relay", "dead", "< 1 d", 1, at(-60)),
        ("relay", "dead", "7 d and more", 1, at(-60 * 24 * 8)),
        ("relay", "retry", "< 1 min", 1, at(-0.5)),
        ("relay", "retry", "< 1 h", 2, at(-59)),
    ]


@pytest.mark.jvm
def test_dead_letters_are_counted_by_their_error(parked):
    found = delivery.dead_letters(
        parked(
            ("relay", "dead", "orders", 5, "no such customer"), ("relay", "dead", "orders", 1, "no such customer"),
            ("relay", "dead", "mail", 1, "e" * 200), ("relay", "retry", "mail", 1, "busy"),
        )
    )  # fmt: skip

    assert rows(found) == [
        ("relay", "orders", "no such customer", 2, at(-5), at(-1)),
        ("relay", "mail", "e" * 120, 1, at(-1), at(-1)),
    ]
