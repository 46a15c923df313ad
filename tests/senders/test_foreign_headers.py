"""Headers of rows that somebody else inserted: they give no orders to a destination, and stop no other message."""

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from outbox import Message, Outbox
from outbox.model.message import stored_message, uuid7
from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders.function import FunctionSender
from outbox.senders.headers import Reserved, wire_headers
from outbox.senders.opening import open_sender
from outbox.senders.port import Sender
from outbox.testing.servers import NatsServer
from tests.support.command_line import outbox as command
from tests.support.destination import relay_to
from tests.support.nats_streams import Stream
from tests.support.servers.proxy import TcpProxy

FIX = "send the message anew without that, and discard this one"

#: What the column may hold that is no JSON object of strings, and what is said of it.
UNFIT = {
    '{"a": {"b": 1}}': "headers['a']: must be a string, not dict",
    '{"a": "b", "c": null}': "headers['c']: must be a string, not NoneType",
    '{"a": 7}': "headers['a']: must be a string, not int",
    '{"a": ["b"]}': "headers['a']: must be a string, not list",
    '["a"]': "headers: must be a JSON object of strings, not '[\"a\"]'",
    "null": "headers: must be a JSON object of strings, not 'null'",
    '"a"': "headers: must be a JSON object of strings, not '\"a\"'",
    "": "headers: must be a JSON object of strings, not ''",
    "a=b": "headers: must be a JSON object of strings, not 'a=b'",
    "[" * 100_000: f"headers: must be a JSON object of strings, not '{'[' * 59}",
}


@pytest.fixture
def stream(nats: NatsServer) -> Iterator[Stream]:
    """A stream that allows what empties it."""
    with TcpProxy("127.0.0.1", nats.port) as proxy, closing(Stream(nats, proxy)) as stream:
        stream.take("orders", allow_rollup_hdrs=True)
        yield stream


def insert(connection: Connection, body: str, headers: str | None = None, key: str | None = None) -> uuid.UUID:
    """A row, written as anybody may who has INSERT on the table."""
    statement = """
        INSERT INTO outbox_message (message_id, topic, key, slot, headers, body)
        VALUES (:id, 'orders', :key, 0, :headers, :body)
    """
    id = uuid7()
    stored = id if connection.dialect.name == "postgresql" else id.hex
    connection.execute(text(statement), {"id": stored, "key": key, "headers": headers, "body": body.encode()})
    return id


def dead(engine: Engine) -> dict[bytes, str]:
    """What became a dead letter, and why."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT body, error FROM outbox_parked WHERE state = 'dead' ORDER BY id"))
        return {bytes(body): error for body, error in rows}


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("Nats-Rollup", "NATS"),
        ("nats-rollup", "NATS"),
        ("Nats-Msg-Id", "NATS"),
        ("NATS-MSG-ID", "NATS"),
        ("Nats-Expected-Last-Sequence", "NATS"),
        ("Nats-TTL", "NATS"),
        ("Status", "NATS"),
        ("Outbox-Key", "the outbox"),
        ("outbox-key", "the outbox"),
        ("OUTBOX-anything", "the outbox"),
        ("Content-Type", "the outbox"),
        ("content-type", "the outbox"),
    ],
)
def test_a_reserved_header_is_a_dead_letter_and_nothing_else_happens(sqlite_engine, stream, name, by):
    """In whatever case it is written."""
    with sqlite_engine.begin() as connection:
        first = insert(connection, "1", key="k")
        value = str(first) if name.lower() == "nats-msg-id" else "all"
        insert(connection, "2", json.dumps({"fine": "yes", name: value}), key="other")
        insert(connection, "3", '{"fine": "yes"}', key="k")

    relay_to(stream.open(), Outbox(sqlite_engine)).until_empty()

    assert stream.held() == [("orders", b"1"), ("orders", b"3")]
    assert dead(sqlite_engine) == {b"2": f"headers[{name!r}]: the name is reserved by {by}; {FIX}"}


def test_a_role_that_may_do_nothing_but_insert_cannot_empty_a_stream(pg_engine, stream):
    role = f"intruder_{uuid.uuid4().hex}"
    with pg_engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role}"))
        connection.execute(text(f"GRANT INSERT ON outbox_message TO {role}"))
        for number in range(5):
            insert(connection, str(number))
    relay_to(stream.open(), Outbox(pg_engine)).until_empty()

    with pg_engine.begin() as connection:
        connection.execute(text(f"SET LOCAL ROLE {role}"))
        insert(connection, "everything", '{"Nats-Rollup": "all"}')
    relay_to(stream.open(), Outbox(pg_engine)).until_empty()

    with pg_engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))
    assert stream.held() == [("orders", b"%d" % number) for number in range(5)]
    assert list(dead(pg_engine)) == [b"everything"]


def test_our_own_fields_are_set_last():
    """Nothing of a row stands in their place, also where a destination reserves nothing."""
    message = row("1", '{"X-Id": "another"}')

    headers = wire_headers(message, id_name="X-Id", reserved=Reserved("nobody", prefixes=()))

    assert headers["X-Id"] == str(message.message_id)


def row(body: str, headers: str | None = None, key: str | None = None) -> Message:
    """A message as it is read from such a row."""
    return stored_message(
        (1, uuid7(), "orders", key, None, headers, body.encode(), None, datetime.now(UTC), None, None)
    )


def shout(message: Message) -> None:
    """A destination that is a function, and takes the headers for what they should be."""
    assert all(value.upper() for value in message.headers.values())


@pytest.fixture(params=["nats", "file", "stdout", "function"])
def sender(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Sender]:
    """A sender of each kind."""
    opened: dict[str, Callable[[], Sender]] = {
        "nats": lambda: request.getfixturevalue("stream").open(),
        "file": lambda: open_sender(f"file://{tmp_path}/messages.jsonl"),
        "stdout": lambda: open_sender("stdout:"),
        "function": lambda: FunctionSender(shout),
    }
    with closing(opened[request.param]()) as sender:
        yield sender


def test_what_is_no_object_of_strings_is_rejected_alone(sender):
    """Whether it comes alone or among others, of which only what stands behind it in its key waits."""
    before, later, other = row("0"), row("2", key="k"), row("3", '{"a": "b"}', key="other")
    answers = {}
    for headers in UNFIT:
        unfit = row("1", headers, key="k")
        [alone] = sender.send([unfit])
        answers[headers] = (alone, sender.send([before, unfit, later, other]))

    waiting = Unavailable("an earlier message of its key was not stored")
    rejected = {headers: Reject(f"{begins}; {FIX}") for headers, begins in UNFIT.items()}
    assert answers == {headers: (each, [DONE, each, waiting, DONE]) for headers, each in rejected.items()}


def test_what_raises_with_good_headers_is_nobodys_fault():
    """A function may raise for its own reasons."""
    sender = FunctionSender(lambda message: 1 / 0)  # type: ignore[arg-type, return-value]  # it does not return

    with pytest.raises(ZeroDivisionError):
        sender.send([row("1", '{"a": "b"}')])


@pytest.mark.parametrize("scheme", ["file", "stdout"])
def test_no_header_passes_for_a_field_of_a_line(scheme, tmp_path, capsys):
    """They stand apart, so none is reserved there."""
    names = ("message_id", "key", "headers", "body", "content_type", "Content-Type", "Outbox-Key", "Nats-Rollup")
    sent = row("body", json.dumps(dict.fromkeys(names, "false")), key="k")
    sender = open_sender(f"file://{tmp_path}/messages.jsonl" if scheme == "file" else "stdout:")

    assert sender.send([sent]) == [DONE]

    line = (tmp_path / "messages.jsonl").read_text() if scheme == "file" else capsys.readouterr().out
    fields = json.loads(line, object_pairs_hook=without_repetition)
    assert fields == {
        "message_id": str(sent.message_id),
        "topic": "orders",
        "key": "k",
        "tags": None,
        "headers": dict.fromkeys(names, "false"),
        "content_type": None,
        "created_at": str(sent.created_at).replace(" ", "T"),
        "body": "body",
    }


def without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON in which no name stands twice."""
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("headers", UNFIT, ids=lambda headers: headers[:20])
def test_such_a_dead_letter_can_be_looked_at(sqlite_engine, tmp_path, headers):
    with sqlite_engine.begin() as connection:
        insert(connection, "1", headers)
    relay_to(open_sender(f"file://{tmp_path}/messages.jsonl"), Outbox(sqlite_engine)).until_empty()  # type: ignore[arg-type]  # any sender will do

    shown, as_json = (command(sqlite_engine, "parked", "show", "1", *more) for more in ([], ["--json"]))

    assert (shown.code, UNFIT[headers] in shown.out) == (0, True)
    assert as_json.json["headers"] == headers
