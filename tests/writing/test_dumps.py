"""An application's own serializer writes what is neither bytes nor text."""

import json
from contextlib import closing

import pytest

from outbox import InvalidMessageError, Outbox
from tests.support.waiting import eventually


class Money:
    """A type that only the application knows."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


def dumps(value: object) -> str:
    """As of a library for JSON."""
    return json.dumps(value, default=lambda money: f"{money.cents} ct")


def bodies(engine) -> list[tuple[bytes, str | None]]:
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT body, content_type FROM outbox_message ORDER BY id")
        return [(bytes(body), content_type) for body, content_type in rows]


def test_it_writes_bodies_of_every_type(engine):
    outbox = Outbox(engine, dumps=dumps)
    with outbox.begin() as session:
        outbox.send(session, "t", {"price": Money(5)})
        outbox.send(session, "t", Money(7), content_type="application/vnd.shop+json")
        outbox.send(session, "t", 42)
        outbox.send(session, "t", "text")
        outbox.send(session, "t", b"bytes")

    json_type = "application/json"
    assert bodies(engine) == [
        (b'{"price": "5 ct"}', json_type), (b'"7 ct"', "application/vnd.shop+json"), (b"42", json_type),
        (b"text", "text/plain"), (b"bytes", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("by", "body", "said"),
    [
        (json.dumps, {"price": Money(5)}, "body: is refused by dumps: TypeError: Object of type Money"),
        (lambda value: value, {"a": 1}, "body: dumps returned dict; return str or bytes"),
        (lambda _: "\ud800", [], "body: holds a lone surrogate"),
        (lambda _: "x" * 5_000_000, [], "body: must be at most 4194304 bytes"),
        (dumps, None, "body: must be bytes, str"),
    ],
)
def test_what_it_cannot_write_is_refused_before_any_sql(sqlite_engine, by, body, said):
    outbox = Outbox(sqlite_engine, dumps=by)

    with outbox.begin() as session, pytest.raises(InvalidMessageError) as refused:
        outbox.send(session, "t", body)

    assert (str(refused.value).startswith(said), bodies(sqlite_engine)) == (True, [])


def test_what_it_wrote_is_what_a_handler_reads(sqlite_engine):
    with closing(outbox := Outbox(sqlite_engine, dumps=lambda value: json.dumps(value).encode())):
        with outbox.begin() as session:
            outbox.send(session, "t", {"é": [1]})
        found = []
        with outbox.running(lambda message: found.append(message.json())):
            assert eventually(lambda: bool(found))

    assert found == [{"é": [1]}]
