"""What a test asks of what it captured, and what it is told when the answer is not what it expects."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from outbox import Message, Outbox
from outbox.testing.capture import Capture


@pytest.fixture
def capture() -> Iterator[Capture]:
    with Capture() as capture:
        yield capture


@pytest.fixture
def shop(sqlite_engine: Engine, capture: Capture) -> Capture:
    """What a shop has sent."""
    outbox = Outbox(sqlite_engine)
    with outbox.begin() as session:
        outbox.send(session, "orders", {"id": 1, "total": 42}, key="order-1", tags="placed", headers={"a": "1"})
        outbox.send(session, "orders", {"id": 2, "total": 17}, key="order-2")
        outbox.send(session, "mails", "Dear Ann")
        with session.begin_nested() as savepoint:
            outbox.send(session, "mails", b"\xff")
            savepoint.rollback()
    return capture


@pytest.mark.parametrize(
    ("description", "found"),
    [
        ({"topic": "orders"}, ["order-1", "order-2"]),
        ({"topic": "orders", "key": "order-2"}, ["order-2"]),
        ({"topic": "mails", "key": None}, [None]),
        ({"topic": "orders", "tags": "placed"}, ["order-1"]),
        ({"topic": "orders", "tags": None}, ["order-2"]),
        ({"topic": "orders", "headers": {"a": "1"}}, ["order-1"]),
        ({"topic": "orders", "body": {"total": 17, "id": 2}}, ["order-2"]),
        ({"topic": "orders", "body": b'{"id":1,"total":42}'}, ["order-1"]),
        ({"topic": "mails", "body": "Dear Ann"}, [None]),
        ({"topic": "orders", "where": lambda message: b"17" in message.body}, ["order-2"]),
    ],
)
def test_a_message_is_found_by_its_description(shop, description, found):
    assert shop.assert_sent(**description).key == found[0]
    assert [message.key for message in shop.assert_sent(**description, count=len(found))] == found


@pytest.mark.parametrize(
    ("description", "text"),
    [
        (
            {"topic": "orders", "key": "order-3", "tags": "placed"},
            """no message was sent to 'orders' with key='order-3', tags='placed'
what was sent:
  'orders' key='order-1' tags='placed' headers={'a': '1'} body={"id":1,"total":42}   (not the same: key)
  'orders' key='order-2' body={"id":2,"total":17}   (not the same: key, tags)
  'mails' body=Dear Ann
what was rolled back:
  'mails' body=b'\\xff'""",
        ),
        (
            {"topic": "mails", "body": "Dear Bob", "count": 2},
            """none of 2 messages was sent to 'mails' with body='Dear Bob'
what was sent:
  'mails' body=Dear Ann   (not the same: body)
  'orders' key='order-1' tags='placed' headers={'a': '1'} body={"id":1,"total":42}
  'orders' key='order-2' body={"id":2,"total":17}
what was rolled back:
  'mails' body=b'\\xff'""",
        ),
        (
            {"topic": "orders", "count": 1, "where": bool},
            """2 messages were sent, not 1, to 'orders' with where=bool
what was sent:
  'orders' key='order-1' tags='placed' headers={'a': '1'} body={"id":1,"total":42}
  'orders' key='order-2' body={"id":2,"total":17}
  'mails' body=Dear Ann
what was rolled back:
  'mails' body=b'\\xff'""",
        ),
    ],
)
def test_a_failure_shows_what_was_sent_instead(shop, description, text):
    with pytest.raises(AssertionError) as caught:
        shop.assert_sent(**description)

    assert str(caught.value) == text


def test_a_failure_without_any_message_says_so(capture):
    with pytest.raises(AssertionError) as caught:
        capture.assert_sent("orders")

    assert str(caught.value) == "no message was sent to 'orders'\nnothing was sent"


def test_a_long_list_is_cut(sqlite_engine, capture):
    outbox = Outbox(sqlite_engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", f"{n:>500}") for n in range(25)])

    with pytest.raises(AssertionError) as caught:
        capture.assert_nothing_sent()

    lines = str(caught.value).splitlines()
    assert (lines[0], len(lines), lines[-1]) == ("25 messages were sent:", 22, "  … and 5 more")
    assert max(map(len, lines)) < 200


def test_nothing_sent(shop):
    shop.assert_nothing_sent("stock")
    with pytest.raises(AssertionError) as caught:
        shop.assert_nothing_sent("mails")
    assert str(caught.value) == "1 message was sent to 'mails':\n  'mails' body=Dear Ann"

    shop.clear()
    shop.assert_nothing_sent()
    assert (shop.messages, shop.committed, shop.rolled_back) == ([], [], [])
