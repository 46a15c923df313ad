"""Two texts name the same destination, or do not; it does not matter which is stored and which is declared."""

import pytest

from outbox.model.destination import same_destination
from outbox.senders.port import destination_of

SAME = [
    ("nats://a:4222", "nats://a:4222"),
    ("nats://a:4222,b:4222/orders", "nats://b:4222,c:4222/orders"),
    ("nats://a:4222/orders?as=main", "nats://b:4222/orders?as=main"),
    ("https://h/hooks?as=a%2Fb", "https://i/hooks?as=a%2Fb"),
    ("kafka://[::1]:9092,b/x", "kafka://[::1]:9092/x"),
    ("callable:shop.send", "callable:shop.send"),
    ("stdout:", "stdout:"),
    ("amqp://a/shop?exchange=x", "amqp://a,b/shop?exchange=x"),
    ("amqp://a?exchange=x&as=main", "amqp://b?exchange=x&as=main"),
]
DIFFERENT = [
    ("nats://a:4222", "nats://b:4222"),
    ("nats://a:4222", "nats://a:4223"),
    ("nats://a:4222", "tls://a:4222"),
    ("nats://a,b/orders", "nats://b,c/mails"),
    ("nats://a,b/orders", "nats://a,b/orders?as=main"),
    ("nats://a,b?as=one", "nats://a,b?as=two"),
    ("nats://a/orders?as=main", "nats://b/mails?as=main"),
    ("nats://a/orders?as=main", "tls://a/orders?as=main"),
    ("https://h/hooks", "https://i/hooks"),
    ("file:///a", "file:///b"),
    ("callable:shop.send", "callable:shop.receive"),
    ("sender:shop.Sender", "nats://a"),
    ("stdout:", "stdout:?as=main"),
    ("amqp://a", "amqp://a?exchange=x"),
    ("amqp://a?exchange=x", "amqp://a?exchange=y"),
    ("amqp://a?exchange=x&as=main", "amqp://a?as=main"),
    ("amqp://a?exchange=x&as=main", "amqp://a?exchange=x"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_destination(one, other):
    assert (same_destination(one, other), same_destination(other, one)) == (True, True)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_another_destination(one, other):
    assert (same_destination(one, other), same_destination(other, one)) == (False, False)


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("amqp://ann:pw@h/shop?timeout=3&exchange=sh%26op&as=x", "amqp://h/shop?exchange=sh%26op&as=x"),
        ("amqp://h?exchange=", "amqp://h"),
        (
            "sqs://eu-central-1/shop?fifo=1&endpoint=http://l:4566",
            "sqs://eu-central-1/shop?endpoint=http%3A%2F%2Fl%3A4566&fifo=1",
        ),
        ("sqs://eu-central-1/shop?fifo=0", "sqs://eu-central-1/shop"),
        ("postgresql://h/shop?schema=a&sslmode=require", "postgresql://h/shop?schema=a"),
        ("redis://h:1/0?wait=1", "redis://h:1/0"),
        ("https://h/hooks?token=abc", "https://h/hooks"),
    ],
)
def test_the_options_that_decide_where_are_stored_and_mean_the_same_again(url, stored):
    assert (destination_of(url), destination_of(stored)) == (stored, stored)
