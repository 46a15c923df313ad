"""The delivery report counts what was written and parked, and measures each batch by its oldest message."""

from datetime import UTC, datetime, timedelta

import pytest

from outbox.model.limits import HALF_TOPIC
from outbox.model.subscription import Subscription
from outbox.spark.reports import delivery

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def at(minutes: float) -> datetime:
    return NOON + minutes * MINUTE


def rows(frame):
    """All rows as values, in the order of the frame."""
    return [tuple(row.values()) for row in frame.toArrow().to_pylist()]


def measured(log, settled, *subscriptions):
    """The batches as rows."""
    return delivery.settled_batches(log, delivery.kept_batches(settled, subscriptions or [subscription()]))


def subscription(name="relay", **fields):
    usual = {"topics": None, "destination": "x", "on_dead": "block", "partitions": 1, "generation": 1}
    return Subscription(name=name, created_at=at(0), **{**usual, **fields})


@pytest.fixture
def messages(spark):
    """Makes messages of (id, topic, minute) and what else is given of them; the number of one is its id."""

    def made(*given, **fields):
        usual = {"slot": 0, "tags": None, "direct": None, **fields}
        data = [
            (id, id, topic, usual["slot"], usual["tags"], usual["direct"], at(minute)) for id, topic, minute in given
        ]
        return spark.createDataFrame(data, delivery.BATCH_COLUMNS)

    return made


@pytest.fixture
def progress(spark):
    """Makes progress rows of (n, base, target, after, minute)."""

    def made(*given, subscription="relay", generation=1, partition=0, epoch=1):
        data = [(subscription, generation, partition, epoch, *rest[:4], at(rest[4])) for rest in given]
        schema = (
            "subscription string, generation int, partition int, epoch long, n long, base string, target string,"
            " after_id long, settled_at timestamp"
        )
        return spark.createDataFrame(data, schema)

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


def test_messages_are_counted_by_topic_and_hour_without_half_messages(messages):
    log = messages(
        (1, "orders", 0), (2, "orders", 59), (3, "orders", 60), (4, "mail", 61), (5, HALF_TOPIC, 61), (6, "mail", 200)
    )

    assert rows(delivery.messages_per_hour(log)) == [
        ("orders", at(0), 2), ("mail", at(60), 1), ("orders", at(60), 1), ("mail", at(180), 1),
    ]  # fmt: skip


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


def test_a_batch_is_measured_by_its_oldest_message(messages, progress):
    log = messages((1, "orders", 0), (2, "orders", 1), (3, "mail", 2), (4, "orders", 6), (5, "orders", 9))
    settled = progress((1, "1:1:", None, None, 0), (2, "4:4:", None, None, 5), (3, "5:5:", None, None, 7), epoch=3)

    found = measured(log, settled)

    assert rows(found) == [
        ("relay", 1, 0, 3, 2, at(5), 3, at(0), 300.0),
        ("relay", 1, 0, 3, 3, at(7), 1, at(6), 60.0),
    ]


def test_what_the_oldest_kept_progress_settled_is_measured_only_where_it_is_the_first_ever(messages, progress):
    log = messages((1, "orders", 0))
    first, later = progress((1, "2:2:", None, None, 5)), progress((7, "2:2:", None, None, 5))

    found = [measured(log, each).count() for each in (first, later)]

    assert found == [1, 0]


def test_only_what_a_subscription_selects_is_its_batch(messages, progress):
    log = (
        messages((1, "orders", 0), (2, "mail", 0), (3, HALF_TOPIC, 0))
        .union(messages((4, "orders", 0), slot=1))
        .union(messages((5, "orders", 0), direct="relay"))
        .union(messages((6, "orders", 0), direct="other"))
        .union(messages((7, HALF_TOPIC, 0), tags="shop"))
    )
    step = (1, "9:9:", None, None, 5)
    names = ("relay", "orders", "relay:compensation", "check:shop")
    settled = progress(step)
    for name in names[1:]:
        settled = settled.union(progress(step, subscription=name))
    settled = settled.union(progress(step, subscription="halves", partition=0))
    settled = settled.union(progress(step, subscription="halves", partition=1))
    subscriptions = [
        subscription(),
        subscription("orders", topics=("orders",)),
        subscription("relay:compensation", kind="compensation"),
        subscription("check:shop", kind="check", topics=(HALF_TOPIC,), tags=("shop",)),
        subscription("halves", partitions=2),
    ]

    found = measured(log, settled, *subscriptions).orderBy("subscription", "partition")

    assert [(row.subscription, row.partition, row.messages) for row in found.collect()] == [
        ("check:shop", 0, 1), ("halves", 0, 4), ("halves", 1, 1), ("orders", 0, 4), ("relay", 0, 4),
        ("relay:compensation", 0, 1),
    ]  # fmt: skip


def test_percentiles_are_over_batches(messages, progress):
    log = messages(*((id, "orders", 0) for id in range(1, 101)))
    settled = progress(
        (1, "1:1:", None, None, 0), *((id + 1, f"{id + 1}:{id + 1}:", None, None, id) for id in range(1, 101))
    )

    batches = measured(log, settled)

    ((name, since, count, number, p50, p95, p99),) = rows(delivery.settling_times(batches))
    assert (name, since, count, number) == ("relay", at(1), 100, 100)
    assert [p50 / 60, p95 / 60, p99 / 60] == pytest.approx([50.5, 95.05, 99.01])


def test_without_progress_nothing_is_measured(messages, progress, spark):
    empty = progress((1, "2:2:", None, None, 5)).limit(0)

    batches = measured(messages((1, "orders", 0)), empty)

    assert (rows(batches), rows(delivery.settling_times(batches))) == ([], [])
