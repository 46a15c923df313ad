"""Topics that a subscription reads from now on: what was written before is counted, and a backfill is named."""

import re
import shlex

import pytest
from sqlalchemy import Engine

from outbox import Outbox, Relay
from tests.support.command_line import Ended, outbox
from tests.support.destination import Destination


def write(shop: Outbox, *topics: str, tags: str | None = None) -> None:
    with shop.begin() as session:
        for topic in topics:
            shop.send(session, topic, topic.encode(), tags=tags)


def began(engine: Engine, *topics: str) -> Outbox:
    """An outbox whose relay has passed three messages, of which it reads one."""
    shop = Outbox(engine)
    write(shop, "orders", "bills", "bills")
    relay(shop, *topics)
    return shop


def relay(shop: Outbox, *topics: str) -> list[bytes]:
    """Let the relay send what there is; return the bodies."""
    destination = Destination()
    Relay(shop, destination, topics=topics or None).until_empty()
    return destination.bodies


def advised(ended: Ended) -> list[str]:
    found = re.search(r"run: outbox (subscriptions .*)", ended.err)
    assert found is not None, ended
    return shlex.split(found[1])


def test_messages_of_a_new_topic_are_counted_and_come_by_the_backfill_that_is_named(engine):
    """The advice of the refused worker, then the advice of that command: nothing is left out."""
    shop = began(engine, "orders")

    altered = outbox(engine, "subscriptions", "alter", "relay", "--topics", "orders,bills")
    backfill = outbox(engine, *advised(altered))

    assert (altered.code, "relay has passed 2 earlier messages of its selection" in altered.err) == (0, True)
    assert (advised(altered)[-1], backfill.code, "warning" in backfill.err.lower()) == ("bills", 0, False)
    assert relay(shop, "orders", "bills") == [b"bills", b"bills"]


def test_a_backfill_before_the_alter_warns_of_what_lies_between(engine):
    """Followed to the letter, the warning leads to each message."""
    shop = began(engine, "orders")

    early = outbox(engine, "subscriptions", "backfill", "relay", "--topics", "bills")
    write(shop, "bills")
    first = relay(shop, "orders")
    altered = outbox(engine, *advised(early))
    again = outbox(engine, *advised(altered))

    assert ("relay does not read all of these topics" in early.err, len(first)) == (True, 2)
    assert advised(early)[-1] == "bills,orders"
    assert (altered.code, again.code, len(relay(shop, "orders", "bills"))) == (0, 0, 3)


@pytest.mark.parametrize("topics", ["orders", "*,!bills", "mails,orders"])
def test_a_selection_without_earlier_messages_is_altered_without_a_word(engine, topics):
    began(engine, "orders")

    ended = outbox(engine, "subscriptions", "alter", "relay", "--topics", topics)

    assert (ended.code, "earlier" in ended.err) == (0, False)


def test_what_the_subscription_has_not_reached_is_not_counted(engine):
    shop = Outbox(engine)
    shop.admin.alter("relay", destination="nats://h:4222", topics=["orders"])
    write(shop, "bills")

    ended = outbox(engine, "subscriptions", "alter", "relay", "--topics", "orders,bills")

    assert (ended.code, "earlier" in ended.err) == (0, False)


def test_a_taken_back_exception_and_wider_tags_name_all_topics(engine):
    shop = began(engine, "!bills")
    write(shop, "orders", tags="new")
    relay(shop, "!bills")

    more = outbox(engine, "subscriptions", "alter", "relay", "--topics", "*")
    outbox(engine, "subscriptions", "alter", "relay", "--tags", "old")
    wider = outbox(engine, "subscriptions", "alter", "relay", "--tags", "old || new")

    assert [(advised(each)[-1], "handled messages come again" in each.err) for each in (more, wider)] == [
        ("*", True),
        ("*", True),
    ]
