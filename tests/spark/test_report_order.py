"""The audit finds messages of a key whose version does not rise, in the order that it was asked about."""

import json

import pytest

from outbox.model.limits import HALF_TOPIC
from outbox.spark.reports import order

SCHEMA = "window long, id long, topic string, key string, headers string, body binary, created_at timestamp"


@pytest.fixture
def messages(spark):
    """Makes messages of (window, id, key, version), with the version in header and body."""

    def made(*given, topic="orders"):
        data = [
            (
                window,
                id,
                topic,
                key,
                json.dumps({"version": str(version)}),
                json.dumps({"order": {"v": version}}).encode(),
                None,
            )
            for window, id, key, version in given
        ]
        return spark.createDataFrame(data, SCHEMA)

    return made


def by_body():
    return order.version_in_body("$.order.v")


def found(audited):
    return [(row.id, row.key, row.previous, row.version, row.problem) for row in order.breaks(audited).collect()]


RISING = ((1, 1, "a", 1), (1, 2, "b", 1), (1, 3, "a", 2), (2, 4, "b", 7), (2, 5, "a", 3))


@pytest.mark.jvm
def test_versions_that_rise_per_key_are_fine(messages):
    audited = order.versions(messages(*RISING), by_body())

    assert found(audited) == []
    assert [row.asDict() for row in order.summary(audited).collect()] == [
        {"topic": "orders", "keys": 2, "messages": 5, "without_version": 0, "unreadable": 0, "fell": 0, "repeated": 0,
         "broken_keys": 0},
    ]  # fmt: skip


@pytest.mark.jvm
def test_versions_that_fall_or_repeat_are_found(messages):
    log = messages(*RISING, (3, 6, "a", 3), (3, 7, "b", 6), (3, 8, "b", 8))

    audited = order.versions(log, by_body())

    assert found(audited) == [(6, "a", 3, 3, "repeated"), (7, "b", 7, 6, "fell")]
    (row,) = order.summary(audited).collect()
    assert (row.fell, row.repeated, row.broken_keys) == (1, 1, 2)


@pytest.mark.jvm
def test_the_window_comes_before_the_id(messages):
    """A message that was committed late has a low id in a later window: that is the order its readers get."""
    log = messages((1, 2, "a", 1), (2, 1, "a", 2))

    by_window = order.versions(log, by_body())
    by_id = order.versions(log.drop("window"), by_body())

    assert (found(by_window), found(by_id)) == ([], [(2, "a", 2, 1, "fell")])


@pytest.mark.jvm
def test_a_version_may_be_in_a_header(messages):
    log = messages((1, 1, "a", 2), (1, 2, "a", 1))

    assert found(order.versions(log, order.version_in_header("version"))) == [(2, "a", 2, 1, "fell")]


@pytest.mark.jvm
@pytest.mark.parametrize("name", ["o'clock", "a.b", "x*", "$|~"])
def test_a_header_may_have_any_name(spark, name):
    rows = [(id, "orders", "a", json.dumps({name: str(version)}), b"", None) for id, version in ((1, 2), (2, 1))]
    log = spark.createDataFrame(rows, order.COLUMNS)

    assert found(order.versions(log, order.version_in_header(name))) == [(2, "a", 2, 1, "fell")]


@pytest.mark.jvm
def test_numbers_are_compared_as_numbers(messages):
    assert found(order.versions(messages((1, 1, "a", 9), (1, 2, "a", 10)), order.version_in_header("version"))) == []


@pytest.mark.jvm
def test_messages_without_a_version_are_counted_and_stand_between_no_others(messages):
    log = messages((1, 1, "a", 2), (1, 2, "a", "new"), (1, 3, "a", None), (1, 4, "a", 2))

    audited = order.versions(log, by_body())

    (row,) = order.summary(audited).collect()
    assert (row.messages, row.without_version, row.unreadable) == (4, 1, 1)
    assert found(audited) == [(4, "a", 2, 2, "repeated")]


@pytest.mark.jvm
def test_a_body_that_is_no_json_has_no_version(spark):
    data = [(1, 1, "orders", "a", None, b"\xff\x00{", None), (1, 2, "orders", "a", None, b"", None)]

    (row,) = order.summary(order.versions(spark.createDataFrame(data, SCHEMA), by_body())).collect()

    assert (row.messages, row.without_version) == (2, 2)


@pytest.mark.jvm
def test_what_has_no_order_is_left_out(messages):
    log = messages((1, 1, None, 2), (1, 2, None, 1)).union(messages((1, 3, "t", 2), (1, 4, "t", 1), topic=HALF_TOPIC))

    assert order.versions(log, by_body()).count() == 0


@pytest.mark.jvm
def test_a_version_may_be_told_once_in_each_topic(messages):
    """One change of a subject may have a message for those who ship and another for those who write letters."""
    log = (
        messages((1, 1, "a", 1), (1, 3, "a", 2))
        .union(messages((1, 2, "a", 1), (1, 4, "a", 2), topic="mail"))
        .union(messages((1, 5, "a", 2)))
    )

    assert found(order.versions(log, by_body())) == [(5, "a", 2, 2, "repeated")]


@pytest.mark.jvm
def test_a_repetition_is_one_although_another_topic_has_fallen_between(messages):
    log = messages((1, 1, "a", 2), (1, 3, "a", 2)).union(messages((1, 2, "a", 1), topic="mail"))

    assert found(order.versions(log, by_body())) == [(2, "a", 2, 1, "fell"), (3, "a", 2, 2, "repeated")]


@pytest.mark.jvm
def test_a_key_is_one_over_all_topics(messages):
    log = messages((1, 1, "a", 2)).union(messages((1, 2, "a", 1), topic="mail"))

    assert [row.topic for row in order.breaks(order.versions(log, by_body())).collect()] == ["mail"]
