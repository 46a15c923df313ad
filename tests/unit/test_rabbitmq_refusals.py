"""Whose fault it is that RabbitMQ closes a channel, by the words of several of its versions."""

import pytest

from outbox.model.message import Message
from outbox.model.verdict import Reject, Unavailable
from outbox.senders.rabbitmq_channel import verdict_of_fault

FORBIDDEN = "ACCESS_REFUSED - access to topic 'a.b' in exchange 'mail' in vhost '/' refused for the user"


@pytest.mark.parametrize("said", ["is larger than configured max size 5", "is larger than max size 5"])
def test_a_message_that_is_too_big_is_at_fault(said):
    reason = f"PRECONDITION_FAILED - message size 6 {said}"

    assert verdict_of_fault(reason, Message("a", b"12345")) is None
    assert verdict_of_fault(reason, Message("a", b"123456")) == Reject(
        "6 bytes are more than the server's max_message_size of 5"
    )


def test_a_message_of_a_forbidden_topic_is_at_fault():
    assert verdict_of_fault(FORBIDDEN, Message("a.b", b"")) == Unavailable(f"RabbitMQ: {FORBIDDEN}")
    assert [verdict_of_fault(FORBIDDEN, Message(topic, b"")) for topic in ("a", "a.b.c", "b")] == [None] * 3


def test_a_reason_that_the_server_has_cut_names_the_beginning_of_the_topic():
    topic = "x" * 249
    reason = f"ACCESS_REFUSED - access to topic '{topic}"[:252] + "..."

    assert verdict_of_fault(reason, Message(topic, b"")) == Unavailable(f"RabbitMQ: {reason}")
    assert verdict_of_fault(reason, Message("x" * 100, b"")) is None


@pytest.mark.parametrize(
    "reason",
    [
        "NOT_FOUND - no exchange 'orders' in vhost '/'",
        "ACCESS_REFUSED - access to exchange 'orders' in vhost '/' refused for the user",
        "ACCESS_REFUSED - cannot publish to internal exchange 'orders' in vhost '/'",
        "PRECONDITION_FAILED - something else",
        "...",
        "",
    ],
)
def test_what_concerns_the_exchange_is_the_fault_of_no_message(reason):
    assert verdict_of_fault(reason, Message("orders", b"x" * 1000)) is None
