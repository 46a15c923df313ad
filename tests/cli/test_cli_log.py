"""`outbox send` and `outbox log`: a first message from the command line, and a look at the log."""

import base64

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from tests.rocketmq.halves import begun
from tests.support.command_line import outbox

OPTIONS = ("--key", "order-7", "--tags", "placed", "--header", "X-Trace=7=8", "--delay", "1h")


def ids(engine: Engine, *options: str) -> list[int]:
    return [each["id"] for each in outbox(engine, "log", "tail", "--json", *options).json["messages"]]


def test_a_message_is_sent_and_shown_with_all_that_it_carries(engine):
    sent = outbox(engine, "send", "orders", "\u00a1hola!", *OPTIONS)

    (found,) = Outbox(engine).admin.newest()
    shown = outbox(engine, "log", "show", str(found.id), "--json").json
    assert (sent.code, sent.err) == (0, f"message {found.message_id} is in the log, topic orders\n")
    assert (shown["body"], shown["key"], shown["tags"], shown["headers"], shown["content_type"]) == (
        "\u00a1hola!", "order-7", "placed", {"X-Trace": "7=8"}, "text/plain",
    )  # fmt: skip
    assert shown["deliver_at"] > shown["created_at"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("or ders", "1"), "topic"),
        (("orders", "1", "--header", "X-Trace"), "--header X-Trace: write NAME=VALUE"),
        (("orders", "1", "--key", ""), "'--key': a key is not empty"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(sqlite_engine, arguments, said):
    ended = outbox(sqlite_engine, "send", *arguments)

    assert (ended.code != 0, said in ended.err, ids(sqlite_engine)) == (True, True, [])


def test_the_newest_are_listed_in_the_order_of_the_log_without_half_messages(engine):
    for topic, key in (("orders", "a"), ("mail", "b"), ("orders", "b")):
        outbox(engine, "send", topic, "1", "--key", key)
    begun(engine, "orders")

    found = [ids(engine, *options) for options in ((), ("--limit", "2"), ("--topic", "orders"), ("--key", "b"))]

    cut = [outbox(engine, "log", "tail", "--json", "--limit", limit).json["more"] for limit in ("2", "3")]
    assert (found, cut) == ([[1, 2, 3], [2, 3], [1, 3], [2, 3]], [True, False])
    assert outbox(engine, "log", "tail").out.splitlines()[1].split()[3:] == ["orders", "a", "1", "1"]
    assert [outbox(engine, "log", "show", id).code for id in ("1", "4", "99")] == [0, 2, 2]


@pytest.mark.parametrize(
    ("body", "name", "listed"),
    [
        (b"1", "body", "1"),
        (b"x" + "é".encode() * 40_000, "body", "x" + "é" * 32_767),
        (b"\xff" * 70_000, "body_base64", base64.b64encode(b"\xff" * 65_536).decode()),
    ],
    ids=["short", "inside of a character", "bytes"],
)
def test_a_list_has_the_first_64_kib_of_a_body_and_its_size_and_one_message_has_all(engine, body, name, listed):
    with (writer := Outbox(engine)).begin() as session:
        writer.send(session, "orders", body)

    (found,) = outbox(engine, "log", "tail", "--json").json["messages"]
    shown = outbox(engine, "log", "show", "1", "--json").json

    whole = body.decode() if name == "body" else base64.b64encode(body).decode()
    assert (found[name], found["body_bytes"]) == (listed, len(body))
    assert (shown[name], shown["body_bytes"]) == (whole, len(body))


@pytest.mark.parametrize(
    "arguments",
    [
        ("log", "show", "99"),
        ("parked", "show", "99"),
        ("parked", "replay", "99"),
        ("parked", "discard", "99", "--reason", "seen"),
        ("parked", "list", "--name", "nope"),
        ("half", "show", "nope"),
        ("half", "commit", "nope"),
        ("half", "resume", "nope"),
        ("subscriptions", "drop", "nope", "--yes"),
    ],
    ids=" ".join,
)
def test_an_id_or_a_name_that_is_not_there_ends_every_command_in_one_way(sqlite_engine, arguments):
    ended = outbox(sqlite_engine, *arguments)

    assert (ended.code, ended.err.startswith("Error: "), ended.err.count("\n")) == (2, True, 1)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("log", "show", str(2**63)), "ID"),
        (("parked", "show", str(2**63)), "ID"),
        (("parked", "replay", str(2**63)), "[ID]\u2026"),
        (("parked", "list", "--limit", str(2**63)), "--limit"),
        (("half", "list", "--limit", str(2**63)), "--limit"),
    ],
)
def test_a_number_that_no_column_holds_is_refused_in_a_line(engine, arguments, name):
    ended = outbox(engine, *arguments)

    said = f"Error: Invalid value for '{name}': {2**63} is not in the range 1<=x<="
    assert (ended.code, ended.err.splitlines()[-1].startswith(said)) == (2, True)


def test_a_body_that_is_no_text_is_shown_in_base64_and_called_so(sqlite_engine):
    with Outbox(sqlite_engine).begin() as session:
        Outbox(sqlite_engine).send(session, "orders", b"\x01\xff")

    assert outbox(sqlite_engine, "log", "show", "1").out.splitlines()[-2:] == ["body         2 bytes in base64", "Af8="]


@pytest.mark.parametrize(
    "arguments",
    [
        ("subscriptions", "pause", "relay", "--key", ""),
        ("subscriptions", "resume", "relay", "--key", ""),
        ("erase", "--key", ""),
        ("parked", "list", "--key", ""),
        ("log", "tail", "--key", ""),
    ],
    ids=" ".join,
)
def test_an_empty_key_is_refused_in_the_words_of_the_command_line(sqlite_engine, arguments):
    ended = outbox(sqlite_engine, *arguments)

    said = "Error: Invalid value for '--key': a key is not empty; for messages without a key leave the option out"
    assert (ended.code, ended.err.splitlines()[-1]) == (2, said)


@pytest.mark.parametrize(
    ("body", "options", "stored"),
    [
        ('{"id": 7}', (), "application/json"),
        ("[7]", (), "application/json"),
        ("7", (), "text/plain"),
        ("{no", (), "text/plain"),
        ('{"id": 7}', ("--content-type", "text/x-log"), "text/x-log"),
    ],
)
def test_json_is_sent_as_json(sqlite_engine, body, options, stored):
    outbox(sqlite_engine, "send", "orders", body, *options)

    shown = outbox(sqlite_engine, "log", "show", "1", "--json").json
    assert (shown["body"], shown["content_type"]) == (body, stored)
