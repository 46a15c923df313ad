"""A message is what it says, byte for byte, or an error that names the field, the limit and the fix."""

import copy
import enum
import json
import reprlib
import sys
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import pytest

from outbox import InvalidMessageError, Message, RetryPolicy
from outbox.model.limits import DELAY_LEVELS
from outbox.model.message import uuid7
from outbox.model.slots import slot_of
from tests.support.bad_input import (
    BAD_BODIES,
    BAD_DELAYS,
    BAD_TIMES,
    GOOD_BODIES,
    GOOD_DELAYS,
    GOOD_TIMES,
    MIB,
    NOT_TEXTS,
    Model,
    Money,
    Order,
)


def refused(**fields: Any) -> str | None:
    """Return the field that the error names, without the place in the field; None if the message was taken.

    An error also names a limit and a fix, does not repeat what was too long, and can be written to a log. Any other
    error is returned whole.
    """
    try:
        Message(**{"topic": "orders", "body": b"", **fields})
    except InvalidMessageError as error:
        said = str(error)
        is_complete = said == f"{error.field}: {error.limit}; {error.fix}" and error.limit != "" and error.fix != ""
        is_text = said.encode(errors="replace").decode() == said
        return error.field.partition("[")[0] if is_complete and is_text and len(said) < 500 else said
    return None


@pytest.mark.parametrize(
    ("body", "data", "content_type"),
    [
        (b"\xff\0", b"\xff\0", None),
        (bytearray(b"ab"), b"ab", None),
        (memoryview(b"abcd")[::2], b"ac", None),
        ("ü\0", b"\xc3\xbc\0", "text/plain"),
        ({"id": 1, "name": "ü"}, '{"id":1,"name":"ü"}'.encode(), "application/json"),
        ([1, None, True, 2.5], b"[1,null,true,2.5]", "application/json"),
        (Order(7, "ann"), b'{"id":7,"name":"ann"}', "application/json"),
        (Model({"id": 7}), b'{"id":7}', "application/json"),
        ([-0.0, 2**53 + 1, 2**80], b"[-0.0,9007199254740993,1208925819614629174706176]", "application/json"),
    ],
)
def test_a_body_becomes_bytes_by_its_type(body, data, content_type):
    message = Message("orders", body)

    assert (message.body, message.content_type) == (data, content_type)


def said(value: Any) -> object:
    """What the objects among the good bodies say that they are."""
    match value:
        case Money():
            return value.said
        case Model():
            return value.dumped
        case date():
            return value.isoformat()
        case uuid.UUID() | Decimal():
            return str(value)
        case _:
            return vars(value)


WITHIN: dict[str, tuple[Any, ...]] = {
    "topic": ("a", "a.b", "a%b|c-d_E.9", "x" * 249, "...", "..a"),
    "key": (KEYS := ("k", " ", "k ", "KEY", "ke\u0301y", "é" * 512, "a\nb", "\ufeff", "'; --", "x" * 1024)),
    "dedup_key": KEYS,
    "tags": ("t", "é" * 255, "a b", "100%"),
    "headers": (
        {},
        {"x": ""},
        {"X-Trace": "ü 😀 'quoted' \"twice\" \\"},
        MappingProxyType({"a": "1", "b": "2"}),
        {f"h{n}": "v" for n in range(160)},
        {"a": "x" * (32 * 1024 - 1)},
        {"!#$%&'*+.^_`|~-9aZ": "every character of a token"},
    ),
    "content_type": ("text/plain", "application/json; charset=utf-8", "x", "a" * 255),
    "deliver_at": tuple(GOOD_TIMES),
    "expires_at": tuple(GOOD_TIMES),
    "delay": tuple(GOOD_DELAYS),
}
OUTSIDE: dict[str, tuple[Any, ...]] = {
    "body": tuple(BAD_BODIES),
    "topic": (
        *NOT_TEXTS,
        *("", ".", "..", "x" * 250, "a b", "a/b", "a*", ">", "#", "ü", "a\n", "a\0", "RMQ_SYS_TRANS_HALF_TOPIC"),
    ),
    "key": (NO_KEYS := (*NOT_TEXTS, "", "a\0", "\0", "é" * 512 + "x", "x" * 1025, "\ud800")),
    "dedup_key": NO_KEYS,
    "tags": (*NOT_TEXTS, "", "a|b", "é" * 256, "a\nb", "a\0", "\u2028", "\x85", "\udfff"),
    "headers": (
        {f"h{n}": "v" for n in range(161)},
        {"a": "x" * (32 * 1024)},
        {"a": "é" * (16 * 1024)},
        {"": "v"},
        {"a b": "v"},
        {"a:b": "v"},
        {":path": "v"},
        {"ü": "v"},
        {"a\r\nb": "v"},
        {1: "v"},
        {b"a": "v"},
        {"a": "1", "A": "2"},
        {"a": 1},
        {"a": None},
        {"a": b"v"},
        {"a": "x\r\nb: y"},
        {"a": "\ud800"},
        {"a": " v"},
        {"a": "v\u00a0"},
        {"Outbox-Key": "v"},
        {"nats-msg-id": "v"},
        [("a", "1")],
        "a: 1",
        *({"a": f"x{chr(code)}y"} for code in [*range(32), 127, 0x85, 0x2028]),
    ),
    "content_type": (*NOT_TEXTS, "", " ", "a ", "a\n", "é", "a" * 256, "a\0"),
    "deliver_at": tuple(BAD_TIMES),
    "expires_at": tuple(BAD_TIMES),
    "delay": tuple(BAD_DELAYS),
}


def test_what_is_within_the_limits_is_taken_as_it_is():
    """A content type overrides that of the body; moments are kept to the microsecond, in UTC."""
    made = [
        (field, value, getattr(Message(**{"topic": "orders", "body": {"a": 1}, field: value}), field))
        for field, values in WITHIN.items()
        for value in values
    ]

    assert [each for each in made if each[1] != each[2]] == []
    assert {kept.tzinfo for _, _, kept in made if isinstance(kept, datetime)} == {UTC}


def test_what_is_outside_the_limits_is_refused_by_the_name_of_its_field():
    found = [
        (field, reprlib.repr(value), refused(**{field: value})) for field, values in OUTSIDE.items() for value in values
    ]

    assert [each for each in found if each[2] != each[0]] == []


def test_a_body_within_the_limits_is_taken():
    made = [(body, Message("orders", body)) for body in GOOD_BODIES]

    assert {type(message.body) for _, message in made} == {bytes}
    assert [
        (body, message.body)
        for body, message in made
        if message.content_type == "application/json"
        and isinstance(body, dict | list)
        and json.loads(message.body) != json.loads(json.dumps(body, default=said))
    ] == []


def test_a_body_that_was_handed_over_can_be_changed_afterwards():
    """The message keeps what it was given, not a view of it."""
    buffer = bytearray(b"before")
    message = Message("orders", buffer)

    buffer[:] = b"after!"

    assert message.body == b"before"


def test_a_topic_that_is_no_text_is_told_to_be_text():
    """And not to be renamed, which is the fix for what has the wrong characters."""
    with pytest.raises(InvalidMessageError, match="topic: must be a str, not NoneType; pass text"):
        Message(None, b"")  # type: ignore[arg-type]  # as someone without a type checker writes it


def test_an_empty_dedup_key_is_not_advised_to_give_up_order():
    """Its errors are its own: without a key there is no order, without a dedup key there may be repeats."""
    with pytest.raises(InvalidMessageError) as caught:
        Message("orders", b"", dedup_key="")

    assert str(caught.value) == (
        "dedup_key: must not be empty; pass None for a message that may be written any number of times"
    )


def test_a_message_without_a_dedup_key_has_none():
    assert Message("orders", b"").dedup_key is None


def test_a_delay_may_be_one_of_the_levels_of_rocketmq():
    levels: dict[Any, int] = {
        "1s": 1, "5s": 5, "10s": 10, "30s": 30, "1m": 60, "2m": 120, "3m": 180, "4m": 240, "5m": 300,
        "6m": 360, "7m": 420, "8m": 480, "9m": 540, "10m": 600, "20m": 1200, "30m": 1800, "1h": 3600,
        "2h": 7200,
    }  # fmt: skip

    found = {name: Message("orders", b"", delay=name).delay for name in levels}

    assert found == {name: timedelta(seconds=seconds) for name, seconds in levels.items()}


def test_the_levels_are_in_the_order_of_rocketmq():
    """Its levels are numbers, from 1 to 18; they are places in this table."""
    assert " ".join(DELAY_LEVELS) == "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    assert sorted(DELAY_LEVELS.values()) == list(DELAY_LEVELS.values())


def test_an_unknown_level_is_answered_with_the_known_ones():
    with pytest.raises(InvalidMessageError, match=r"1s 5s 10s .* 1h 2h"):
        Message("orders", b"", delay="3h")  # type: ignore[arg-type]  # that a type checker says so too is the point


def test_a_delay_and_a_moment_exclude_each_other():
    assert refused(delay=timedelta(0), deliver_at=datetime(2026, 1, 1, tzinfo=UTC)) == "delay"


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    "expires_at", [NOON, NOON - timedelta(hours=1), NOON.astimezone(timezone(timedelta(hours=-3)))], ids=str
)
def test_a_message_that_expires_before_it_may_be_delivered_is_refused(expires_at):
    assert refused(deliver_at=NOON, expires_at=expires_at) == "expires_at"


def test_a_message_may_expire_a_moment_after_it_may_be_delivered():
    message = Message("orders", b"", deliver_at=NOON, expires_at=NOON + timedelta(microseconds=1))

    assert (message.deliver_at, message.expires_at) == (NOON, NOON + timedelta(microseconds=1))


def test_text_of_an_enumeration_is_its_value():
    class Topic(enum.StrEnum):
        ORDERS = "orders"

    class Key(str, enum.Enum):  # noqa: UP042 - the older way, which many applications have
        ANN = "ann"

    message = Message(Topic.ORDERS, b"", key=Key.ANN, headers={"who": Key.ANN})

    assert (message.topic, message.key, message.headers) == ("orders", "ann", {"who": "ann"})


def test_text_of_an_enumeration_that_came_first_is_plain_text_for_the_others():
    """Checked topics are remembered, and a member of an enumeration equals its text."""

    class Topic(enum.StrEnum):
        REMEMBERED = "remembered"

    found = [Message(topic, b"").topic for topic in (Topic.REMEMBERED, "remembered")]

    assert [type(topic) for topic in found] == [str, str]


def test_a_message_is_not_changed_by_its_headers():
    """What `headers` returns is the reader's own."""
    given = {"a": "1"}
    message = Message("orders", b"", headers=given)
    given["b"] = "2"
    found: Mapping[str, str] = message.headers

    assert (found, message.headers) == ({"a": "1"}, {"a": "1"})


def test_ids_are_version_7_and_carry_their_moment():
    before = time.time_ns() // 1_000_000
    made = [uuid7() for _ in range(1000)]
    after = time.time_ns() // 1_000_000

    assert {(id.version, id.variant) for id in made} == {(7, uuid.RFC_4122)}
    assert len(set(made)) == 1000
    stamps = [id.int >> 80 for id in made]
    assert before <= stamps[0]
    assert stamps == sorted(stamps)
    assert stamps[-1] <= after


#: First 4 bytes of the SHA-256 of the UTF-8 key, big-endian, modulo the number of slots.
SLOTS = {
    "order-1": (33, 65),
    "order-42": (87, 71),
    "a": (18, 610),
    "k\u00e9y": (239, 607),
    "ke\u0301y": (232, 936),
    "\U0001f600": (52, 188),
    "x" * 1024: (91, 299),
    " ": (241, 625),
}


def test_the_slot_of_a_key_is_the_same_for_ever():
    assert {key: (slot_of(key, 256), slot_of(key, 1000)) for key in SLOTS} == SLOTS


def test_messages_without_a_key_are_spread_over_all_slots():
    assert {slot_of(None, 8) for _ in range(1000)} == set(range(8))


def test_a_body_just_over_the_limit_says_how_large_it_is():
    with pytest.raises(InvalidMessageError) as caught:
        Message("orders", b"x" * (4 * MIB + 1))

    assert str(caught.value) == ("body: must be at most 4194304 bytes, not 4194305; store it elsewhere, send a link")


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"attempts": 0}, ValueError, "attempts must be a whole number from 1 on, not 0"),
        ({"attempts": "3"}, ValueError, "attempts must be a whole number from 1 on, not '3'"),
        (
            {"wait": 5},
            TypeError,
            r"wait must be a wait strategy of tenacity, not 5; write wait_fixed\(5\) or wait_chain",
        ),
    ],
)
def test_a_retry_policy_that_would_fail_at_the_first_failure_is_refused(fields, error, text):
    with pytest.raises(error, match=text):
        RetryPolicy(**fields)


@pytest.mark.parametrize(("failures", "most"), [(1, 1), (2, 2), (3, 4), (6, 32), (10, 512), (11, 600), (100, 600)])
def test_a_message_that_failed_waits_at_random_up_to_a_bound_that_doubles(failures, most):
    """Full jitter, from 1 s on: what failed together does not come again together, nor often."""
    waits = [RetryPolicy().delay(failures).total_seconds() for _ in range(300)]

    assert 1 <= min(waits) <= 1 + (most - 1) / 4
    assert most - (most - 1) / 4 <= max(waits) <= most


# Copies


def fields_of(message: Message) -> dict[str, Any]:
    """All that was given for it."""
    names = (
        "topic",
        "body",
        "content_type",
        "key",
        "tags",
        "headers",
        "deliver_at",
        "delay",
        "expires_at",
        "dedup_key",
    )
    return {name: getattr(message, name) for name in names}


MOMENT = datetime(2031, 1, 1, tzinfo=UTC)
SAID: dict[str, Any] = {
    "key": "k", "tags": "t", "headers": {"A": "ü"}, "content_type": "text/x; charset=latin-1", "delay": "30m",
    "expires_at": MOMENT, "dedup_key": "d",
}  # fmt: skip


def copied(message: Message, **fields: Any) -> dict[str, Message]:
    """A copy by every way there is."""
    ways = {"replace": message.replace(**fields), "__replace__": message.__replace__(**fields)}
    if sys.version_info >= (3, 13):
        ways["copy.replace"] = copy.replace(message, **fields)
    return ways


@pytest.mark.parametrize("fields", [{}, SAID, {"deliver_at": MOMENT}], ids=["little", "much", "a time"])
def test_a_copy_is_another_message_of_the_same_fields(fields):
    message = Message("orders", "ü".encode("latin-1"), **fields)
    for found in copied(message).values():
        assert fields_of(found) == fields_of(message)
        assert found.message_id != message.message_id


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"topic": "mail", "key": None}, {"topic": "mail", "key": None}),
        ({"headers": {}, "tags": "u", "dedup_key": None}, {"headers": {}, "tags": "u", "dedup_key": None}),
        ({"body": {"id": 1}}, {"body": b'{"id":1}', "content_type": "application/json"}),
        ({"body": b"1"}, {"body": b"1", "content_type": None}),
        ({"body": "1", "content_type": "a/b"}, {"body": b"1", "content_type": "a/b"}),
        ({"content_type": None}, {"content_type": None}),
        ({"delay": timedelta(1)}, {"delay": timedelta(1)}),
        ({"deliver_at": MOMENT - timedelta(1)}, {"deliver_at": MOMENT - timedelta(1), "delay": None}),
        ({"delay": None}, {"delay": None}),
    ],
)
def test_a_copy_has_what_was_said_otherwise(fields, expected):
    message = Message("orders", b"1", **SAID)
    for found in copied(message, **fields).values():
        assert fields_of(found) == fields_of(message) | expected


def test_a_delay_replaces_a_time():
    message = Message("orders", b"", deliver_at=MOMENT)

    assert message.replace(delay="1s").delay == timedelta(seconds=1)
    assert message.replace(delay="1s").deliver_at is None


def test_a_copy_is_within_the_limits_too():
    message = Message("orders", b"", deliver_at=MOMENT)
    wrong: Any = {"colour": "red"}

    with pytest.raises(InvalidMessageError, match=r"^topic: "):
        message.replace(topic="no such topic!")
    with pytest.raises(InvalidMessageError, match=r"^expires_at: must lie after deliver_at"):
        message.replace(expires_at=MOMENT)
    with pytest.raises(TypeError, match="colour"):
        message.replace(**wrong)


def test_a_copy_of_what_a_handler_got_is_new():
    """To be sent on: it has no place in the log yet, and no attempts."""
    message = Message("orders", b"1", **SAID)
    message.id, message.attempt, message.created_at = 7, 3, MOMENT

    found = message.replace(topic="archive")

    assert (found.id, found.attempt, found.created_at) == (None, 1, None)
    assert fields_of(found) == fields_of(message) | {"topic": "archive"}


def test_the_arguments_of_rocketmqs_message_are_told_their_names():
    for others in (("tag", b"1"), ("tag", "key", b"1"), ("tag", "key", 0, b"1", True)):
        with pytest.raises(TypeError, match=r"is Message\(topic, body, tags=…, key=…\) here"):
            Message("orders", *others)
