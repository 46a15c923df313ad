"""What is written is read back whole, whatever a role or a database has set for the clients of PostgreSQL."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox, Retry, create_engine
from outbox.model.message import MessageFields
from tests.support.destination import Destination, accepted, failing, relay_to
from tests.support.handles import a_connection, a_psycopg_connection
from tests.support.parked import states
from tests.support.readers import delivered

SETTINGS = {
    "array_nulls": ["off"],
    "backslash_quote": ["on", "off"],
    "bytea_output": ["escape"],
    "DateStyle": ["SQL, DMY", "German", "Postgres, MDY"],
    "escape_string_warning": ["on"],
    "extra_float_digits": ["-15", "3"],
    "IntervalStyle": ["sql_standard", "postgres_verbose", "iso_8601"],
    "standard_conforming_strings": ["off"],
    "TimeZone": ["America/New_York", "Asia/Kathmandu"],
    "transform_null_equals": ["on"],
}
ALL = {name: values[0] for name, values in SETTINGS.items()}
CASES = {
    **{f"{name} {value}": {name: value} for name, values in SETTINGS.items() for value in values},
    "all of them": ALL,
}

ODD = 'it\'s "odd" \\ \\\' \\\\ {NULL,""} $1 %s :x ü'
MOMENT = datetime(2031, 2, 3, 4, 5, 6, 789_012, tzinfo=UTC)
#: Of delays of 91, 182 and 273 days some cross a change of the clock, at whatever time of the year a test runs.
FIELDS: list[MessageFields] = [
    {},
    {"key": "NULL", "tags": "NULL", "headers": {"null": "NULL"}, "content_type": "NULL"},
    {"key": ODD, "tags": ODD, "headers": {"odd": ODD}, "content_type": 'text/x; a="\\\'"'},
    {"deliver_at": MOMENT, "key": "null"},
    {"expires_at": MOMENT, "tags": "{}"},
    {"delay": timedelta(days=91, seconds=3, microseconds=7)},
    {"delay": timedelta(days=182)},
    {"delay": timedelta(days=273, microseconds=-1)},
    {"delay": timedelta(microseconds=1_500_000), "expires_at": MOMENT, "headers": {"a": "", "b": "\\"}},
    {"delay": timedelta(days=36_525), "key": "\\"},
    {"dedup_key": "NULL"},
    {"dedup_key": ODD, "key": "k"},
    {"dedup_key": "\\"},
]
BODIES = [b"", bytes(range(256)), b"NULL", b"\\x00", b"\\", b"'", ODD.encode()]


def some(first: int, number: int) -> list[Message]:
    """Messages with every kind of field; no two have a dedup key in common."""
    found = []
    for n in range(first, first + number):
        fields = FIELDS[n % len(FIELDS)].copy()
        if "dedup_key" in fields:
            fields["dedup_key"] = f"{fields['dedup_key']}{n if n >= len(FIELDS) else ''}"
        found.append(Message("orders", BODIES[n % len(BODIES)], **fields))
    return found


def whole(message: Message, *, since: datetime | None = None) -> tuple[Any, ...]:
    """All of it; `since`: when it was written, if it says a delay."""
    deliver_at = message.deliver_at if message.delay is None or since is None else since + message.delay
    return (
        message.message_id, message.topic, message.key, message.tags, message.headers, message.body,
        message.content_type, deliver_at, message.expires_at,
    )  # fmt: skip


def set_for(engine: Engine, settings: dict[str, str]) -> None:
    """For every connection to this database from now on, of writers and workers."""
    with engine.begin() as connection:
        for name, value in settings.items():
            connection.execute(text(f"ALTER ROLE postgres IN DATABASE {engine.url.database} SET {name} = '{value}'"))
    engine.dispose()


def written(outbox: Outbox, handle: AbstractContextManager[Any]) -> list[Message]:
    """Messages in statements of one, of a few and of many, and repetitions of some."""
    given = [some(0, 1), *(some(n, 1) for n in range(1, len(FIELDS))), some(20, 3), some(30, 20), some(50, 47)]
    with handle as connection:
        for messages in given:
            ids = outbox.send_all(connection, messages, lock_keys=True)
            assert ids == [message.message_id for message in messages]
        for messages in given:
            again = [message.replace() for message in messages if message.dedup_key is not None]
            first = [message.message_id for message in messages if message.dedup_key is not None]
            assert outbox.send_all(connection, again) == first
        connection.commit()
    return [message for messages in given for message in messages]


def make_due(engine: Engine) -> set[int]:
    """The time of whatever is parked has come; returns the seconds that those that failed would have waited."""
    with engine.begin() as connection:
        failed = text("SELECT extract(epoch FROM due_at - parked_at)::integer FROM outbox_parked WHERE state = 'retry'")
        found = set(connection.execute(failed).scalars())
        connection.execute(text("UPDATE outbox_parked SET due_at = created_at WHERE state IN ('delayed', 'retry')"))
    return found


def require_same(found: Sequence[Message], given: Sequence[Message]) -> None:
    """Compare whole messages; the order among those that are parked is another one."""
    by_id = {message.message_id: message for message in found}
    assert len(by_id) == len(found)
    assert {id: whole(message) for id, message in by_id.items()} == {
        message.message_id: whole(message, since=by_id[message.message_id].created_at) for message in given
    }


@pytest.mark.parametrize("handle", [pytest.param(a_connection, marks=pytest.mark.storm), a_psycopg_connection])
@pytest.mark.parametrize("case", CASES)
def test_no_setting_changes_a_message(pg_engine, case, handle):
    """Delayed messages go by the parked ones, and so do those that fail first."""
    set_for(pg_engine, CASES[case])
    outbox = Outbox(pg_engine)
    given = written(outbox, handle(pg_engine))
    destination = Destination(failing({b"\\"}, Retry("it's \\ NULL", after=timedelta(hours=1))))

    relay_to(destination, outbox).until_empty()
    parked = states(pg_engine)
    waits = make_due(pg_engine)
    destination.answer = accepted
    relay_to(destination, outbox).until_empty()

    assert {"delayed", "retry"} <= set(parked)
    # Some seconds more on a busy machine; a time zone is wrong by a quarter of an hour at least.
    assert waits and waits <= {*range(3600, 3900)}
    assert states(pg_engine) == {}
    require_same(destination.messages, given)


def test_what_the_client_says_itself_is_no_different(pg_engine):
    options = " ".join(f"-c {name}={value.replace(' ', '')}" for name, value in ALL.items())
    engine = create_engine(pg_engine.url, connect_args={"options": options})
    outbox = Outbox(engine)
    given = [message for message in some(0, 60) if message.delay is None and message.deliver_at is None]
    with engine.begin() as connection:
        outbox.send_all(connection, given)

    require_same(delivered(outbox.database), given)
    engine.dispose()


def test_topics_are_selected_under_any_setting(pg_engine):
    set_for(pg_engine, ALL)
    outbox = Outbox(pg_engine)
    with pg_engine.begin() as connection:
        outbox.send_all(connection, [Message(topic, b"") for topic in ("NULL", "null", "other", "x")])

    found = delivered(outbox.database, topics=("NULL", "x"))

    assert [message.topic for message in found] == ["NULL", "x"]
