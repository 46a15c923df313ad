"""Whatever is put into a message arrives byte for byte, or is refused before any SQL. Never accepted and then stuck."""

import json
import string
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, event, text

from outbox import InvalidMessageError, Message, Outbox
from outbox.store.operations.check import tables_of
from tests.support.bad_input import (
    BAD_BODIES,
    BAD_DELAYS,
    BAD_TIMES,
    GOOD_BODIES,
    GOOD_TIMES,
    NOT_TEXTS,
    TEXTS,
)
from tests.support.readers import delivered, in_utc

#: What is compared: all that a writer says.
FIELDS = ("message_id", "topic", "key", "tags", "headers", "content_type", "body", "deliver_at", "expires_at")

Fields = dict[str, Any]


def said(message: Message) -> dict[str, object]:
    """What its writer said of a message."""
    return {name: getattr(message, name) for name in FIELDS}


@dataclass
class Attempts:
    """Messages that were tried in one transaction: which were taken, and what was said of the others."""

    taken: list[Message] = field(default_factory=list)
    refused: list[InvalidMessageError] = field(default_factory=list)
    outcomes: list[bool] = field(default_factory=list)


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """The statements that the application's connections execute."""
    seen: list[str] = []

    def executed(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", executed)
    yield seen
    event.remove(engine, "before_cursor_execute", executed)


def attempt(outbox: Outbox, connection: Connection, fields: Fields, into: Attempts) -> None:
    """Send one message, which costs one statement, with a dedup key two; or none, when it is refused."""
    with statements(outbox.engine) as seen:
        try:
            id = outbox.send(connection, **fields)
        except InvalidMessageError as error:
            into.refused.append(error)
            id = None
    assert len(seen) == (0 if id is None else 2 if "dedup_key" in fields else 1)
    into.outcomes.append(id is not None)
    if id is not None:
        expected = Message(**fields)
        expected.message_id = id
        into.taken.append(expected)


def run(outbox: Outbox, messages: list[Fields]) -> Attempts:
    """Try them all in one transaction, which stays usable, and let a worker deliver what was taken."""
    attempts = Attempts()
    with outbox.engine.begin() as connection:
        for fields in messages:
            attempt(outbox, connection, fields, attempts)
            assert connection.execute(text("SELECT 1")).scalar() == 1
    assert all(error.field and error.limit and error.fix for error in attempts.refused)
    return attempts


def arrived(outbox: Outbox) -> list[dict[str, object]]:
    """What a worker hands over or parks, in the order of the log."""
    found = {message.id or 0: said(message) for message in delivered(outbox.database)}
    with outbox.engine.begin() as connection:
        for row in connection.execute(tables_of(outbox.database).parked.select()).mappings():
            moments = {name: in_utc(row[name]) for name in ("deliver_at", "expires_at")}
            fields = {name: row[name] for name in FIELDS} | moments
            found[row["id"]] = fields | {"headers": json.loads(row["headers"] or "{}")}
        connection.execute(tables_of(outbox.database).parked.delete())
    return [found[id] for id in sorted(found)]


def message(field: str, value: object) -> Fields:
    """A message with one field like that."""
    match field:
        case "header name":
            return {"topic": "orders", "body": b"", "headers": {value: "v"}}
        case "header value":
            return {"topic": "orders", "body": b"", "headers": {"x": value}}
        case _:
            return {"topic": "orders", "body": b"", field: value}


def plain(value: str) -> bool:
    """Whether it is on one line, without control characters."""
    return not any(unicodedata.category(character) in {"Cc", "Zl", "Zp"} for character in value)


WORD = set(string.ascii_letters + string.digits)

#: Which texts a field takes; none of them takes what is not text.
TAKES: dict[str, Callable[[str], bool]] = {
    "topic": lambda text: (
        1 <= len(text) <= 249
        and set(text) <= WORD | set("._%|-")
        and text not in {".", "..", "RMQ_SYS_TRANS_HALF_TOPIC"}
    ),
    "key": lambda text: 1 <= len(text.encode()) <= 1024 and "\0" not in text,
    "dedup_key": lambda text: 1 <= len(text.encode()) <= 1024 and "\0" not in text,
    "tags": lambda text: 1 <= len(text) <= 255 and plain(text) and "|" not in text,
    "content_type": lambda text: 1 <= len(text) <= 255 and text.isascii() and plain(text) and text == text.strip(),
    "header name": lambda text: (
        text != ""
        and set(text) <= WORD | set("!#$%&'*+.^_`|~-")
        and not text.lower().startswith(("outbox-", "nats-"))
        and text.lower() != "content-type"
    ),
    "header value": lambda text: plain(text) and text == text.strip(),
    "body": lambda text: True,
}
#: What the error calls these fields.
CALLED = {"header name": "headers", "header value": "headers"}


def takes(field: str, value: object) -> bool:
    """Whether the field takes the value."""
    if not isinstance(value, str) or any(0xD800 <= ord(character) <= 0xDFFF for character in value):
        return False
    small = field in {"body", "key", "dedup_key"} or len(value.encode()) < 32 * 1024
    return small and TAKES[field](value)


@pytest.mark.parametrize("field", TAKES)
def test_any_text_in_any_field_arrives_or_is_refused(engine, field):
    outbox = Outbox(engine)
    values = (
        TEXTS if field == "body" else [*TEXTS, *(value for value in NOT_TEXTS if not isinstance(value, list | dict))]
    )

    attempts = run(outbox, [message(field, value) for value in values])

    assert [said(sent) for sent in attempts.taken] == arrived(outbox)
    assert attempts.outcomes == [takes(field, value) for value in values]
    assert {error.field.partition("[")[0] for error in attempts.refused} == {CALLED.get(field, field)}


def test_any_body_arrives_or_is_refused(engine):
    outbox = Outbox(engine)

    attempts = run(outbox, [message("body", body) for body in (*GOOD_BODIES, *BAD_BODIES)])

    assert arrived(outbox) == [said(sent) for sent in attempts.taken]
    assert (len(attempts.taken), len(attempts.refused)) == (len(GOOD_BODIES), len(BAD_BODIES))


@pytest.mark.parametrize("which", ["deliver_at", "expires_at"])
def test_any_moment_arrives_or_is_refused(engine, which):
    outbox = Outbox(engine)

    attempts = run(outbox, [message(which, moment) for moment in (*GOOD_TIMES, *BAD_TIMES)])

    assert arrived(outbox) == [said(sent) for sent in attempts.taken]
    assert (len(attempts.taken), len(attempts.refused)) == (len(GOOD_TIMES), len(BAD_TIMES))


def test_a_delay_counts_from_the_insert_by_the_clock_of_the_database(engine):
    outbox = Outbox(engine)
    delays = [timedelta(0), timedelta(hours=1), timedelta(days=36_525)]

    attempts = run(outbox, [message("delay", delay) for delay in (*delays, *BAD_DELAYS)])

    assert len(attempts.refused) == len(BAD_DELAYS)
    log = tables_of(outbox.database).message
    with engine.connect() as connection:
        rows = connection.execute(log.select().order_by(log.c.id)).all()
    assert [row.deliver_at - row.created_at for row in rows] == delays


def test_more_headers_than_allowed_are_refused(engine):
    outbox = Outbox(engine)
    numbers = (0, 1, 160, 161, 200)

    attempts = run(outbox, [message("headers", {f"h{n}": "v" for n in range(number)}) for number in numbers])

    assert arrived(outbox) == [said(sent) for sent in attempts.taken]
    assert (len(attempts.taken), len(attempts.refused)) == (3, 2)


def test_one_bad_message_among_many_writes_none_of_them(engine):
    """It is refused where it is made, so that `send_all` never gets to see it."""
    outbox = Outbox(engine)
    with engine.begin() as connection:
        with statements(engine) as seen, pytest.raises(InvalidMessageError):
            outbox.send_all(connection, [Message("orders", b"1"), Message("orders", b"2", key=""), Message("c", b"3")])
        assert seen == []
        outbox.send(connection, "orders", b"4")

    assert [sent["body"] for sent in arrived(outbox)] == [b"4"]


# Seeds, and what grows out of them

SEED = st.integers(0, len(TEXTS) - 1).map(lambda n: TEXTS[n])
ANY_TEXT = st.one_of(
    SEED,
    st.text(max_size=300),
    st.text(alphabet=st.characters(codec="utf-8"), max_size=40),
    st.builds(lambda one, other: one[:200] + other[:200], SEED, SEED),
)
LIKELY_TOKEN = st.text(alphabet="abcXYZ019-_.", min_size=1, max_size=20)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT | st.integers(), inner, max_size=4),
    max_leaves=10,
)
ANY_BODY = st.one_of(st.binary(max_size=200), ANY_TEXT, ANY_JSON, st.sampled_from([b"", b"x" * 70_000]))
ANY_MOMENT = st.datetimes(timezones=st.sampled_from([UTC, None]) | st.timezones())


def rarely(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """None, or a value: most messages leave most fields alone, else nearly all of them would be refused."""
    return st.one_of(st.none(), st.none(), st.none(), strategy)


ANY_MESSAGE = st.fixed_dictionaries(
    {
        "topic": st.one_of(LIKELY_TOKEN, LIKELY_TOKEN, LIKELY_TOKEN, ANY_TEXT),
        "body": ANY_BODY,
        "key": st.none() | ANY_TEXT,
        "tags": rarely(ANY_TEXT),
        "headers": st.dictionaries(LIKELY_TOKEN, ANY_TEXT, max_size=3)
        | rarely(st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=70)),
        "content_type": rarely(ANY_TEXT),
        "deliver_at": rarely(ANY_MOMENT),
        "expires_at": rarely(ANY_MOMENT),
    }
)


@pytest.mark.storm
def test_generated_messages_arrive_or_are_refused(engine, full):
    """Twenty to a transaction; a worker goes on from where the last one came to."""
    outbox = Outbox(engine)
    counted = Attempts()

    @settings(
        max_examples=260 if full else 20,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(st.lists(ANY_MESSAGE, min_size=20, max_size=20))
    def each(messages: list[Fields]) -> None:
        attempts = run(outbox, messages)
        counted.taken += attempts.taken
        counted.refused += attempts.refused
        assert arrived(outbox) == [said(sent) for sent in attempts.taken]

    each()

    assert len(counted.taken) + len(counted.refused) >= (5000 if full else 300)
    assert counted.taken
    refused = {error.field.partition("[")[0] for error in counted.refused}
    # So many that each of these is among them; a few hundred may lack one.
    assert refused >= ({"topic", "body", "key", "headers"} if full else {"key"})
