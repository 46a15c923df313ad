"""A comparison with the archive finds whatever a purge would lose, and names the first range with it."""

from datetime import UTC, datetime

import pytest

from outbox.spark.reports.archive import compare, differences
from outbox.spark.tables import ddl
from outbox.store.log.extraction import MESSAGES, columns_of

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
COLUMNS = tuple(columns_of(MESSAGES))


def row(id, **changed):
    """A message with all that one may have; the columns are those of `messages`."""
    full = {
        "id": id, "xact_id": 700 + id, "message_id": f"{id:036}", "topic": "orders", "key": f"order-{id}", "slot": 3,
        "tags": None, "headers": '{"a":"b"}', "content_type": None, "body": b"%d" % id, "created_at": NOON,
        "deliver_at": None, "expires_at": None,
    }  # fmt: skip
    return tuple({**full, **changed}[name] for name in COLUMNS)


@pytest.fixture
def frame(spark):
    def made(*rows):
        return spark.createDataFrame(list(rows), ddl(MESSAGES, COLUMNS))

    return made


def shown(ranges):
    return [(each.first_id, each.last_id, each.rows, each.archived, each.same) for each in ranges]


@pytest.mark.jvm
def test_ranges_that_are_the_same(frame):
    """What was purged before is in the archive alone."""
    stored = frame(row(1), row(9), row(10), row(35))
    archived = frame(row(35), row(2), row(1), row(9), row(10), row(21))

    assert shown(compare(stored, archived, width=10)) == [
        (0, 9, 2, 2, True),
        (10, 19, 1, 1, True),
        (30, 39, 1, 1, True),
    ]


CHANGES = {
    "id": None, "xact_id": 1, "message_id": "other", "topic": "mail", "key": None, "slot": 4, "tags": "t",
    "headers": None, "content_type": "text/plain", "body": b"", "created_at": NOON.replace(microsecond=1),
    "deliver_at": NOON, "expires_at": NOON,
}  # fmt: skip


@pytest.mark.jvm
def test_every_column_counts(frame):
    """In one look: each column is changed in a range of its own."""
    changed = [name for name in COLUMNS if name != "id"]
    stored = frame(*(row(at * 10) for at in range(len(changed))))
    archived = frame(*(row(at * 10, **{name: CHANGES[name]}) for at, name in enumerate(changed)))

    assert [each.same for each in compare(stored, archived, width=10)] == [False] * len(changed)


@pytest.mark.jvm
def test_a_value_in_the_column_beside_it_is_another(frame):
    stored, archived = frame(row(1, tags="x", headers=None)), frame(row(1, tags=None, headers="x"))

    assert [each.same for each in compare(stored, archived)] == [False]


@pytest.mark.jvm
def test_two_messages_that_have_changed_bodies_are_noticed(frame):
    stored, archived = frame(row(1), row(2)), frame(row(1, body=b"2"), row(2, body=b"1"))

    assert shown(compare(stored, archived)) == [(0, 99_999, 2, 2, False)]


@pytest.mark.jvm
def test_what_is_missing_different_or_there_twice_is_named(frame):
    stored = frame(row(1), row(2), row(3, topic="mail"), row(4), row(15))
    archived = frame(row(1), row(2, body=b"x"), row(4), row(4))

    (first, second) = compare(stored, archived, width=10)

    found = [tuple(each) for each in differences(first.first_id, first.last_id, stored, archived).collect()]
    assert (first.same, first.rows, first.archived, second.archived) == (False, 4, 4, 0)
    assert found == [(2, "orders", "different"), (3, "mail", "missing"), (4, "orders", "several times")]


@pytest.mark.jvm
def test_without_messages_there_is_nothing_to_compare(frame):
    assert compare(frame(row(1)).limit(0), frame(row(1))) == []
