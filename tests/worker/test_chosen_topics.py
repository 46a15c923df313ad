"""A selection of topics is a list of names that messages can have; anything else would select nothing, in silence."""

import pytest

from outbox import Outbox, Relay, SubscriptionError
from tests.support.command_line import outbox as command_line
from tests.support.destination import Destination

WRONG = {
    "one text": ("orders", r"not one text; pass \['orders'\]"),
    "a pattern": (["orders.*"], "but is 'orders.\\*'; topics are whole names, without wildcards"),
    "no text": ([5], "must be a str, not int"),
    "an empty list": ([], "must not be empty; pass None for all"),
}


@pytest.mark.parametrize(("topics", "error"), WRONG.values(), ids=WRONG)
def test_what_would_select_nothing_is_refused(sqlite_engine, topics, error):
    with pytest.raises(SubscriptionError, match=error):
        Relay(Outbox(sqlite_engine), Destination(), topics=topics)


def test_topics_are_kept_once_each_and_in_order(sqlite_engine):
    relay = Relay(Outbox(sqlite_engine), Destination(), topics=iter(["b", "a", "b"]))

    assert relay._worker._declared.topics == ("a", "b")


@pytest.mark.parametrize("verb", [["relay", "--to", "stdout:", "--once"], ["subscriptions", "alter", "relay"]])
def test_the_command_line_refuses_them_too(sqlite_engine, verb):
    Relay(Outbox(sqlite_engine), Destination()).once()

    answer = command_line(sqlite_engine, *verb, "--topics", "orders.*")

    assert answer.code != 0
    assert "topics are whole names" in answer.err
