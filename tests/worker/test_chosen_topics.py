"""A selection is a list of topics that messages can have, or of patterns; anything else would select nothing."""

import json

import pytest

from outbox import Message, Outbox, Relay, SubscriptionError
from tests.support.command_line import outbox as command_line
from tests.support.destination import Destination

WRONG = {
    "one text": ("orders", r"not one text; pass \['orders'\]"),
    "a blank": (["new orders"], "but is 'new orders'; rename it, or write a pattern such as 'orders.\\*'"),
    "no text": ([5], "must be a str, not int"),
    "an empty list": ([], "must not be empty; pass None for all"),
}


@pytest.mark.parametrize(("topics", "error"), WRONG.values(), ids=WRONG)
def test_what_would_select_nothing_is_refused(sqlite_engine, topics, error):
    with pytest.raises(SubscriptionError, match=error):
        Relay(Outbox(sqlite_engine), Destination(), topics=topics)


def test_topics_are_kept_once_each_and_in_order(sqlite_engine):
    relay = Relay(Outbox(sqlite_engine), Destination(), topics=iter(["b", "a", "b"]))

    assert relay._worker._subscriptions[0].job.declared.topics == ("a", "b")


@pytest.mark.parametrize("verb", [["relay", "--to", "stdout:", "--until-empty"], ["subscriptions", "alter", "relay"]])
def test_the_command_line_refuses_them_too(sqlite_engine, verb):
    Relay(Outbox(sqlite_engine), Destination()).once()

    answer = command_line(sqlite_engine, *verb, "--topics", "new orders")

    assert answer.code != 0
    assert "topics: one must be 1 to 249 characters" in answer.err


def test_a_pattern_chooses_from_the_command_line_too(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    with outbox.begin() as session:
        for topic in ("orders.new", "orders.internal", "users"):
            outbox.send(session, topic, topic)

    answer = command_line(
        sqlite_engine, "relay", "--to", "stdout:", "--until-empty", "--topics", "orders.*,!*.internal"
    )

    assert (answer.code, [json.loads(line)["topic"] for line in answer.out.splitlines()]) == (0, ["orders.new"])


def test_once_and_once_again_passes_many_messages_of_others(engine):
    """Each time as many as are read at once, although none of them is sent, and no time goes by."""
    outbox, destination = Outbox(engine), Destination()
    with outbox.begin() as session:
        outbox.send_all(session, [Message("others", str(number)) for number in range(3000)])
        outbox.send(session, "orders", "1")
    relay = Relay(outbox, destination, topics=["orders"])

    for _ in range(4):
        relay.once()

    assert [message.body for message in destination.messages] == [b"1"]
