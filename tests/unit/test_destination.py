"""Two texts name the same destination, or do not; it does not matter which is stored and which is declared."""

import pytest

from outbox.model.destination import same_destination

SAME = [
    ("nats://a:4222", "nats://a:4222"),
    ("nats://a:4222,b:4222/orders", "nats://b:4222,c:4222/orders"),
    ("nats://a:4222/orders?as=main", "nats://b:4222/orders?as=main"),
    ("https://h/hooks?as=a%2Fb", "https://i/hooks?as=a%2Fb"),
    ("kafka://[::1]:9092,b/x", "kafka://[::1]:9092/x"),
    ("callable:shop.send", "callable:shop.send"),
    ("stdout:", "stdout:"),
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
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_destination(one, other):
    assert (same_destination(one, other), same_destination(other, one)) == (True, True)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_another_destination(one, other):
    assert (same_destination(one, other), same_destination(other, one)) == (False, False)
