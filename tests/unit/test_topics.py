"""Topics of a selection: names, patterns and exceptions; what they match, and which ways to write them are one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import SubscriptionError
from outbox.model.limits import HALF_TOPIC
from outbox.model.topics import Topics, chosen_topics, covers, exact_topics

#: Few letters, so that patterns and topics often have something in common.
TOPICS = st.text("ab.%", min_size=1, max_size=6).filter(lambda topic: topic not in (".", ".."))
PATTERNS = st.text("ab.%*", min_size=1, max_size=6).filter(lambda part: part.replace("*", "x") not in (".", ".."))
PARTS = st.one_of(TOPICS, PATTERNS, PATTERNS.map("!{}".format), TOPICS.map("!{}".format))


def naive(parts: list[str], topic: str) -> bool:
    """What a list of names, patterns and exceptions says of a topic, by regular expressions."""

    def matches(part: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, part.split("*"))), topic) is not None

    included = [part for part in parts if not part.startswith("!")] or ["*"]
    return any(map(matches, included)) and not any(matches(part[1:]) for part in parts if part.startswith("!"))


@given(parts=st.lists(PARTS, min_size=1, max_size=5), topic=TOPICS)
def test_a_topic_matches_as_a_naive_matcher_says(parts, topic):
    assert Topics.of(parts).matches(topic) == naive(parts, topic)


@given(parts=st.lists(PARTS, min_size=1, max_size=5), topic=TOPICS)
def test_what_is_stored_matches_the_same_topics(parts, topic):
    try:
        chosen = chosen_topics(parts)
    except SubscriptionError:
        assert not naive(parts, topic)
        return

    assert Topics.of(chosen).matches(topic) == naive(parts, topic)
    assert chosen_topics(chosen) == chosen


@given(one=PATTERNS, other=PATTERNS, topic=TOPICS)
def test_a_pattern_that_covers_another_matches_all_of_its_topics(one, other, topic):
    if covers(one, other) and naive([other], topic):
        assert naive([one], topic)


@given(parts=st.lists(PARTS, min_size=1, max_size=4), others=st.lists(PATTERNS, min_size=1, max_size=3), topic=TOPICS)
def test_a_split_gives_each_topic_to_one_side(parts, others, topic):
    topics = Topics.of(parts)
    taken = naive(others, topic)

    try:
        moved, left = topics.within(others), topics.without(others)
    except SubscriptionError:
        return  # only a part of a pattern in common, or nothing left

    assert (moved is not None and moved.matches(topic)) == (naive(parts, topic) and taken)
    assert left.matches(topic) == (naive(parts, topic) and not taken)


ONE_FORM = {
    "all": (["*"], None),
    "a star beside names": (["*", "orders"], None),
    "names": (["b", "a", "b"], ("a", "b")),
    "a pattern and what it covers": (["orders.new", "orders.*", "a"], ("a", "orders.*")),
    "exceptions alone": (["*", "!orders.*"], ("!orders.*",)),
    "an exception of nothing": (["users.*", "!orders.*"], ("users.*",)),
    "an exception of a part": (["users.*", "!users.x*"], ("!users.x*", "users.*")),
    "two stars": (["orders.**"], ("orders.*",)),
}


@pytest.mark.parametrize(("topics", "stored"), ONE_FORM.values(), ids=ONE_FORM)
def test_two_ways_to_write_the_same_topics_have_one_form(topics, stored):
    assert chosen_topics(topics) == stored


def test_half_messages_are_read_only_by_their_name():
    chosen = (("*",), ("RMQ_*",), ("!orders",), (HALF_TOPIC,))

    assert [Topics.of(each).matches(HALF_TOPIC) for each in (None, *chosen)] == [False, False, False, False, True]


REFUSED = {
    "a space": (["a b*"], "is 'a b'; rename it, or write a pattern such as 'orders.\\*'"),
    "an empty exception": (["!"], "must be 1 to 249 characters"),
    "two marks": (["!!a"], "is '!a'"),
    "a dot": (["."], "not . or .., but is '.'"),
    "too long": (["a" * 250 + "*"], "must be 1 to 249 characters"),
    "no text": ([5], "must be a str, not int"),
    "one text": ("orders.*", r"not one text; pass \['orders.\*'\]"),
    "nothing left": (["orders.*", "!ord*"], "the exceptions leave none of them"),
    "nothing at all": (["!*"], "the exceptions leave none of them"),
    "half messages": ([HALF_TOPIC], "is reserved for half messages"),
}


@pytest.mark.parametrize(("topics", "error"), REFUSED.values(), ids=REFUSED)
def test_topics_that_no_message_can_have_are_refused(topics, error):
    with pytest.raises(SubscriptionError, match=error):
        chosen_topics(topics)


@pytest.mark.parametrize("topics", [["*"], ["orders.*"], ["!orders"]])
def test_a_reader_of_whole_names_says_so(topics):
    with pytest.raises(SubscriptionError, match="is a pattern or an exception; here topics are whole names"):
        exact_topics(topics)


def test_a_part_of_a_pattern_cannot_be_taken_out():
    with pytest.raises(SubscriptionError, match=r"'orders.\*' has only a part of the topics of '\*.new' in common"):
        Topics.of(["*.new"]).within(["orders.*"])
