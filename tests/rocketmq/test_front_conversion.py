"""Messages of any writer come out in the protocol's form: headers that a front has not written may have anything."""

from datetime import UTC, datetime
from uuid import uuid4

import pytest

from outbox.model.limits import stored_headers
from outbox.model.message import Message, stored_message
from outbox.rocketmq.front.conversion import BORN_AT, ID, KEYS, OTHERS, stored, wire_of
from outbox.rocketmq.front.protocol import kind, moment_of

WRITTEN = datetime(2026, 1, 2, tzinfo=UTC)


def a_message(headers: dict[str, str]) -> Message:
    return of_another_writer(stored_headers(headers))


def of_another_writer(headers: str | None) -> Message:
    return stored_message((1, uuid4(), "orders", None, None, headers, b"x", None, WRITTEN, None, None))


@pytest.mark.parametrize("born", ["", "soon", "9" * 20, "9" * 5000, "1e3"])
def test_a_birth_that_is_no_moment_is_that_of_the_insert(born):
    wire = wire_of(a_message({BORN_AT: born}), "NORMAL")

    assert moment_of(wire.system_properties.born_timestamp) == WRITTEN


@pytest.mark.parametrize(
    ("header", "properties"),
    [
        ("no JSON", {}),
        ("[" * 5000, {}),
        ('["a"]', {}),
        ('{"a": 1, "b": "2", "c": null}', {"b": "2"}),
        (r'{"a": "\ud800", "\ud800": "a"}', {}),
    ],
)
def test_properties_that_are_no_texts_are_left_out(header, properties):
    wire = wire_of(a_message({OTHERS: header}), "NORMAL")

    assert dict(wire.user_properties) == properties


@pytest.mark.parametrize(
    ("headers", "properties"),
    [
        (None, {}),
        ("[1]", {}),
        ('"x"', {}),
        ("no JSON", {}),
        ('{"UNIQ_KEY": 5, "KEYS": ["k"], "a": 1, "b": "2"}', {"b": "2"}),
    ],
)
def test_headers_that_are_no_texts_are_left_out(headers, properties):
    """A message that no client can be given would be handed out for ever."""
    wire = wire_of(of_another_writer(headers), "NORMAL")

    system = wire.system_properties
    assert (dict(wire.user_properties), list(system.keys), len(system.message_id)) == (properties, [], 34)


def test_a_moment_that_no_calendar_has_is_kept_out_of_the_way():
    sent = kind("Message")(body=b"x")
    sent.topic.name, sent.system_properties.message_id = "orders", "A" * 34
    sent.system_properties.born_timestamp.seconds = 2**62

    message = stored(sent)

    assert (message.headers[ID], wire_of(message, "NORMAL").body, KEYS in message.headers) == ("A" * 34, b"x", False)
