"""`send_all` of any length: it cuts its statements by itself, and what it returns is in the order of the log."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, event, text

from outbox import InvalidMessageError, Message, Outbox, create_engine
from outbox.model.message import MessageFields
from outbox.store.operations.check import tables_of
from tests.scenarios.matrix.held import play
from tests.scenarios.matrix.homes import KINDS, Home
from tests.support.handles import awaited
from tests.support.readers import bodies, in_utc

MIB = 1024 * 1024


def rows_of(parameters: Any) -> int:
    """A list of rows, or the one row there is; a row of lists, or parameters with a number each."""
    if isinstance(parameters, dict):
        arrays = parameters.get("topic")
        return sum(name.startswith("topic_") for name in parameters) if arrays is None else len(arrays)
    return 1 if isinstance(parameters, tuple) else len(parameters)


@contextmanager
def inserts(engine: Engine) -> Iterator[list[int]]:
    """How many messages each statement inserts."""
    seen: list[int] = []

    def executed(_c: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if "INSERT INTO outbox_message" in statement:
            seen.append(rows_of(parameters))

    event.listen(engine, "before_cursor_execute", executed)
    yield seen
    event.remove(engine, "before_cursor_execute", executed)


def log(engine: Engine) -> list[UUID]:
    """The ids of the log, in its order."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT message_id FROM outbox_message ORDER BY id"))
        return [UUID(str(id)) for (id,) in rows]


@pytest.mark.storm
def test_many_messages_go_in_few_statements_in_their_order(engine):
    outbox = Outbox(engine)
    messages = [Message(f"topic-{n % 7}", str(n), key=None if n % 3 else f"order-{n % 100}") for n in range(12_000)]
    with outbox.begin() as session, inserts(engine) as seen:
        ids = outbox.send_all(session, messages)

    assert seen == [5_000, 5_000, 2_000]
    assert ids == [message.message_id for message in messages] == log(engine)


@pytest.mark.storm
def test_large_messages_go_in_statements_of_bounded_size(engine):
    outbox = Outbox(engine)
    messages = [Message("orders", bytes([n]) * MIB) for n in range(40)]
    with outbox.begin() as session, inserts(engine) as seen:
        ids = outbox.send_all(session, messages)

    assert seen == [16, 16, 8]
    assert ids == log(engine)
    assert [(len(body), body[0]) for body in bodies(engine)] == [(MIB, n) for n in range(40)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4 * MIB] * 5, [4, 1]),
        ([1] + [4 * MIB] * 4, [4, 1]),
        ([0] * 5_001, [5_000, 1]),
        ([0] * 5_000, [5_000]),
    ],
    ids=["the largest", "a small one first", "one too many", "just as many"],
)
def test_where_statements_are_cut(engine, sizes, expected):
    outbox = Outbox(engine)
    messages = [Message("orders", bytes(size)) for size in sizes]
    with outbox.begin() as session, inserts(engine) as seen:
        outbox.send_all(session, messages)

    assert seen == expected
    assert [len(body) for body in bodies(engine)] == sizes


def test_any_iterable_will_do(engine):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        ids = outbox.send_all(session, (Message("orders", str(n)) for n in range(3)))
        none = outbox.send_all(session, iter(()))

    assert (ids, none) == (log(engine), [])


ENGINES = {"postgresql": "pg_engine", "sqlite": "sqlite_engine"}


@pytest.mark.parametrize(
    ("handle", "database"), [(handle, name) for name in ENGINES for handle in KINDS if name in KINDS[handle].on]
)
def test_every_handle_takes_more_than_a_statement_holds(request, handle, database):
    kind, engine = KINDS[handle], request.getfixturevalue(ENGINES[database])
    messages = [Message("orders", str(n), dedup_key=f"{n}" if n % 2 else None) for n in range(5_100)]
    found: list[UUID] = []

    async def scenario(_: object) -> None:
        async with kind.open(Home(engine.url, create_engine, engine), "", Outbox) as held:
            found.extend(await held.send_all(messages))
            await held.commit()

    play(scenario, None, awaited=kind.awaited)

    assert found == [message.message_id for message in messages] == log(engine)


# Nothing by halves


def test_a_bad_message_in_the_middle_writes_nothing(engine):
    """All of them are looked at before any SQL, also those of a generator."""
    outbox = Outbox(engine)

    def messages() -> Iterator[Message]:
        for n in range(6_000):
            yield Message("orders" if n != 5_500 else "no such topic!", str(n))

    wrong: Any = [*(Message("orders", str(n)) for n in range(6_000)), "not a message", Message("orders", "")]
    with outbox.begin() as session, inserts(engine) as seen:
        with pytest.raises(InvalidMessageError, match="topic"):
            outbox.send_all(session, messages())
        with pytest.raises(TypeError, match="send_all takes Message objects, not str"):
            outbox.send_all(session, wrong)

    assert (seen, bodies(engine)) == ([], [])


def test_a_bad_message_in_the_middle_writes_nothing_async(engine):
    outbox = Outbox(awaited(engine))
    wrong: Any = [Message("orders", ""), {"topic": "orders"}]

    async def scenario() -> None:
        async with outbox.abegin() as session:
            with pytest.raises(TypeError, match="asend_all takes Message objects, not dict"):
                await outbox.asend_all(session, wrong)

    asyncio.run(scenario())
    assert bodies(engine) == []


def test_a_message_that_is_in_the_list_twice_is_refused(engine):
    """One id twice in the log: whoever tells messages apart by it would drop the second."""
    outbox = Outbox(engine)
    message, others = Message("orders", "1"), [Message("orders", str(n)) for n in range(100)]
    for messages in ([message, message], [message, *others, message], [*others, message, message, message]):
        with outbox.begin() as session, inserts(engine) as seen, pytest.raises(InvalidMessageError) as caught:
            outbox.send_all(session, messages)
        limit = (
            f"{message.message_id} is in the list {messages.count(message)} times, which inboxes and destinations would"
            " take for one message"
        )
        fix = "send a copy, which has an id of its own: message.replace()"
        assert seen == []
        assert (caught.value.field, caught.value.limit, caught.value.fix) == ("message_id", limit, fix)
    with outbox.begin() as session:
        outbox.send_all(session, [message, message.replace(), *others])

    assert len(set(log(engine))) == 102


def test_a_message_that_is_in_the_list_twice_is_refused_async(engine):
    outbox, message = Outbox(awaited(engine)), Message("orders", "1")

    async def scenario() -> None:
        async with outbox.abegin() as session:
            with pytest.raises(InvalidMessageError, match=r"^message_id: .* is in the list 2 times"):
                await outbox.asend_all(session, [message, message])

    asyncio.run(scenario())
    assert bodies(engine) == []


def test_a_message_that_is_sent_by_two_calls_is_one_message(engine):
    outbox, message = Outbox(engine), Message("orders", "1")
    with outbox.begin() as session:
        ids = [outbox.send_all(session, [message]) for _ in range(2)]

    assert ids == [[message.message_id]] * 2
    assert log(engine) == [message.message_id] * 2


REFUSALS = {
    "postgresql": "ALTER TABLE outbox_message ADD CONSTRAINT refused CHECK (body <> 'refused')",
    "sqlite": "CREATE TRIGGER refusing BEFORE INSERT ON outbox_message WHEN NEW.body = CAST('refused' AS BLOB)"
    " BEGIN SELECT RAISE(ABORT, 'refused'); END",
}


def test_what_the_database_refuses_in_the_last_statement_takes_all_along(engine):
    outbox = Outbox(engine)
    with engine.begin() as connection:
        connection.execute(text(REFUSALS[engine.dialect.name]))
    messages = [Message("orders", "refused" if n == 5_500 else str(n)) for n in range(6_000)]
    with pytest.raises(Exception, match="refused"), outbox.begin() as session:
        outbox.send_all(session, messages)

    assert bodies(engine) == []


# Of every length, whatever the statement looks like

MOMENT = datetime(2031, 1, 1, tzinfo=UTC)
FIELDS: dict[str, list[MessageFields]] = {
    "nothing": [{}],
    "a key and a tag": [{"key": "k"}, {"tags": "t"}, {}],
    "an expiry": [{}, {"expires_at": MOMENT}, {}, {}, {}],
    "a delay": [{}, {}, {"delay": timedelta(hours=1)}],
    "a time": [{"deliver_at": MOMENT}],
    "everything": [
        {"key": "k", "tags": "t", "headers": {"a": "{}\\,\"'"}, "content_type": "x/y", "deliver_at": MOMENT},
        {"delay": timedelta(hours=1), "expires_at": MOMENT},
        {},
    ],
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_rows_hold_what_was_given_at_every_length(engine, fields):
    outbox = Outbox(engine)
    table = tables_of(outbox.database).message
    given: list[Message] = []
    for length in (1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 49, 50, 51, 120):
        some = [Message("orders", f"{length} {n}", **fields[n % len(fields)]) for n in range(length)]
        with engine.begin() as connection, inserts(engine) as seen:
            outbox.send_all(connection, some)
        assert seen == [length]
        given += some

    with engine.connect() as connection:
        rows = connection.execute(table.select().order_by(table.c.id)).all()
    assert [
        (r.message_id, r.topic, r.key, r.tags, r.headers, r.body, r.content_type, in_utc(r.deliver_at),
         in_utc(r.expires_at))
        for r in rows
    ] == [
        (
            m.message_id, m.topic, m.key, m.tags, m.headers_json, m.body, m.content_type,
            m.deliver_at if m.delay is None else in_utc(r.created_at + m.delay), m.expires_at,
        )
        for r, m in zip(rows, given, strict=True)
    ]  # fmt: skip


# Of many writers


def test_the_order_of_one_is_kept_among_many(pg_engine):
    """Their messages may be mixed in the log; those of each are in its order."""
    outbox = Outbox(awaited(pg_engine))

    async def writer(name: str) -> None:
        async with outbox.abegin() as session:
            for part in range(3):
                await outbox.asend_all(session, [Message("orders", f"{name} {part * 100 + n}") for n in range(100)])

    async def scenario() -> None:
        await asyncio.gather(*map(writer, "abcdef"))

    asyncio.run(scenario())
    found = [body.decode().split() for body in bodies(pg_engine)]
    assert Counter(name for name, _ in found) == dict.fromkeys("abcdef", 300)
    for name in "abcdef":
        assert [int(n) for of, n in found if of == name] == list(range(300))
