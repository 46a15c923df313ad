"""CloudEvents: what the sender writes is what the SDK of the CloudEvents project reads."""

import base64
import json
import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from hypothesis import HealthCheck, given, settings

from outbox.errors import InvalidMessageError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject
from outbox.senders.envelopes import ENVELOPES
from outbox.senders.opening import open_sender
from outbox.testing.sender_contract import a_message, check_all_done, messages
from tests.support.remote import a_row

FIX = "send the message anew without that, and discard this one"


def sent_as(endpoint, message: Message):
    """Send a message to a web server as an event; return what arrived."""
    sender = open_sender(f"{endpoint.url}/x", envelope="cloudevents")
    check_all_done(sender.send([message]), [message])
    sender.close()
    return endpoint.kept[-1]


def event_of(message: Message) -> bytes:
    """The event that a message becomes."""
    return ENVELOPES["cloudevents"](message, message.topic).body


def read(received) -> BaseCloudEvent:
    """What the SDK makes of a request."""
    return from_http_event(HTTPMessage(dict(received.headers), received.body))


def full() -> Message:
    """A message that has everything."""
    message = a_message(
        "orders.placed",
        {"id": 7, "name": "Zoë"},
        key='order "7": ü%',
        tags="placed, päid",
        headers={"X-Trace": "a: b", "traceparent": "00-1"},
    )
    message.created_at = datetime(2026, 1, 31, 14, 0, 0, 123456, tzinfo=UTC).astimezone(timezone(timedelta(hours=2)))
    return message


def test_structured_mode_is_one_object(endpoint):
    sent = full()

    received = sent_as(endpoint, sent)

    assert received.headers["Content-Type"] == "application/cloudevents+json"
    assert received.headers["X-Trace"] == "a: b"
    assert json.loads(received.body) == {
        "specversion": "1.0",
        "id": str(sent.message_id),
        "source": "/outbox",
        "type": "orders.placed",
        "subject": 'order "7": ü%',
        "time": "2026-01-31T14:00:00.123456Z",
        "datacontenttype": "application/json",
        "tags": "placed, päid",
        "data": {"id": 7, "name": "Zoë"},
    }


def test_the_sdk_reads_what_was_sent(endpoint):
    sent = full()

    event = read(sent_as(endpoint, sent))

    assert event.get_attributes() == {
        "specversion": "1.0",
        "id": str(sent.message_id),
        "source": "/outbox",
        "type": "orders.placed",
        "subject": 'order "7": ü%',
        "time": sent.created_at,
        "datacontenttype": "application/json",
        "tags": "placed, päid",
    }
    assert event.get_data() == {"id": 7, "name": "Zoë"}


def test_a_field_that_a_message_has_not_is_not_sent(endpoint):
    received = sent_as(endpoint, Message("orders", b""))

    event, named = read(received), [*received.headers, *json.loads(received.body or b"{}")]
    # The SDK takes the present for a time that is missing.
    assert set(event.get_attributes()) - {"time"} == {"specversion", "id", "source", "type"}
    assert {"ce-time", "time", "ce-subject", "subject", "Content-Type", "data"} & set(named) <= {"Content-Type"}
    assert event.get_data() is None


@pytest.mark.parametrize(
    ("body", "content_type", "member", "value"),
    [
        (b'{"a": 1.10, "b": 123456789012345678901234567890}', "application/json", "data", None),
        (b" [1]\n", "application/json; charset=utf-8", "data", [1]),
        (b'"text"', "application/vnd.shop+json", "data", "text"),
        (b"null", "text/json", "data", None),
        (b'"\\ud800"', "application/json", "data", "\ud800"),
        (b"{oops", "application/json", "data_base64", b"{oops"),
        (b"[NaN]", "application/json", "data_base64", b"[NaN]"),
        (b"[1] []", "application/json", "data_base64", b"[1] []"),
        (b'1},"id":"2"', "application/json", "data_base64", b'1},"id":"2"'),
        (b'"\xff"', "application/json", "data_base64", b'"\xff"'),
        (b"\xef\xbb\xbf[1]", "application/json", "data_base64", b"\xef\xbb\xbf[1]"),
        (b"[" * 100_000, "application/json", "data_base64", b"[" * 100_000),
        (b"9" * 5000, "application/json", "data_base64", b"9" * 5000),
        ("Zoë \u2028 <&>\0".encode(), "text/plain", "data", "Zoë \u2028 <&>\0"),
        (b"Zo\xc3\xab", 'text/plain; charset="UTF-8"', "data", "Zoë"),
        (b"Zo\xeb", "text/plain; charset=latin-1", "data_base64", b"Zo\xeb"),
        (b"Zo\xeb", "text/plain", "data_base64", b"Zo\xeb"),
        (b"{}", None, "data_base64", b"{}"),
        (b"{}", "application/octet-stream", "data_base64", b"{}"),
        (b"{}", "application/jsonx", "data_base64", b"{}"),
        (b"<x/>", "application/xml", "data_base64", b"<x/>"),
    ],
    ids=lambda each: repr(each)[:30],
)
def test_a_body_is_json_text_or_base64_and_always_exact(body, content_type, member, value):
    message = Message("orders", body, content_type=content_type)

    written = event_of(message)

    envelope = json.loads(written)
    assert {"data", "data_base64"} & set(envelope) == {member}
    if member == "data_base64":
        assert base64.b64decode(envelope[member]) == value
    elif content_type is not None and "json" in content_type:
        # The same characters, because numbers and repeated names mean different things to different readers.
        assert b'"data":' + body + b"}" in written
    else:
        assert envelope[member] == value
    assert envelope["id"] == str(message.message_id)


@pytest.mark.storm
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(messages())
def test_the_sdk_reads_every_message_or_it_is_refused(message):
    """Every field as it was."""
    if message.key is not None and re.search(r"[\x00-\x1f\x7f-\x9f]", message.key):
        with pytest.raises(InvalidMessageError, match="key: CloudEvents allow no control characters in subject"):
            event_of(message)
        return
    envelope = HTTPMessage({"content-type": "application/cloudevents+json"}, event_of(message))
    structured = from_http_event(envelope)

    expected = {
        "specversion": "1.0",
        "id": str(message.message_id),
        "source": "/outbox",
        "type": message.topic,
        "subject": message.key,
        "time": message.created_at,
        "datacontenttype": message.content_type,
        "tags": message.tags,
    }
    expected = {name: value for name, value in expected.items() if value is not None}
    assert structured.get_attributes() == expected
    if message.content_type is None:
        assert structured.get_data() == (message.body or None)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"key": "a\r\nb"}, "key: CloudEvents allow no control characters in subject"),
        ({"key": "\x7f"}, "key: CloudEvents allow no control characters in subject"),
        ({"key": "\ufdd0"}, "key: CloudEvents allow no control characters in subject"),
        ({"key": "\U0001ffff"}, "key: CloudEvents allow no control characters in subject"),
        ({"key": ""}, "key: CloudEvents have no empty subject"),
        ({"tags": "a\x00"}, "tags: CloudEvents allow no control characters in tags"),
        ({"content_type": ""}, "content_type: CloudEvents have no empty datacontenttype"),
        ({"content_type": "a\x01"}, "content_type: CloudEvents allow no control characters in datacontenttype"),
    ],
)
def test_what_cloud_events_cannot_carry_is_rejected_alone(endpoint, fields, reason):
    strange = a_row(**fields)
    sender = open_sender(f"{endpoint.url}/x", envelope="cloudevents")

    before, refused, after = sender.send([a_message("orders", 1), strange, a_message("orders", 2)])
    sender.close()

    assert (before, refused, after) == (DONE, Reject(f"{reason}; {FIX}"), DONE)
