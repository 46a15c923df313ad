"""Topics that nobody has tried yet: which of their messages share a call, before the destination accepts any."""

import pytest

from outbox import Message, Unavailable, Verdict
from outbox.model.verdict import DONE
from tests.support.stage import Handler, Stage, hanging, ids, messages


def of_topics(*topics_and_keys: tuple[str, str | None]) -> list[Message]:
    """Messages with these topics and keys, numbered in the order of the log."""
    return [each for id, (topic, key) in enumerate(topics_and_keys, 1) for each in messages(key, first=id, topic=topic)]


def test_a_message_does_not_pass_an_earlier_one_of_its_key_because_its_topic_is_new():
    handler = Handler(lambda message: Unavailable("no topic") if message.topic == "missing" else DONE)
    given = of_topics(("missing", None), ("a", None), ("a", "k"), ("b", "k"))

    Stage(handler).run(given)

    assert [id for call in handler.calls for id in call if id > 2] == [3, 4]


def test_a_topic_whose_messages_raise_does_not_hide_the_others():
    def answer(message: Message) -> Verdict:
        if message.topic == "broken":
            raise ValueError("cannot take this")
        return Unavailable("no topic") if message.topic == "missing" else DONE

    stage = Stage(Handler(answer), looks=300)

    outcome = stage.run(of_topics(("missing", None), ("broken", None), ("good", None)))

    assert ids(outcome.done) == [3]


def test_a_message_that_raises_is_found_among_others_of_a_topic_that_was_refused_before():
    refused = [Unavailable("no topic")]

    def answer(message: Message) -> Verdict:
        if message.id == 2:
            raise ValueError("cannot take this")
        return refused.pop() if refused else DONE

    stage = Stage(Handler(answer), looks=300)

    outcome = stage.run(messages(None, None, None, topic="sick"))

    assert sorted(ids(outcome.done)) == [1, 3]


def test_a_refused_topic_is_not_tried_without_a_pause_beside_a_message_that_failed():
    def answer(message: Message) -> Verdict:
        if message.topic == "broken":
            raise ValueError("cannot take this")
        return Unavailable("no topic")

    handler = Handler(answer)
    stage = Stage(handler, looks=300)

    stage.run(of_topics(("broken", None), *[("missing", None)] * 4), quota=0)

    # A round has a call for each message.
    assert len(handler.calls) <= 5 * (stage.pauses + 1)


def test_a_refused_topic_is_not_tried_without_a_pause_for_what_stands_behind_it():
    handler = Handler(lambda _: Unavailable("no topic"))
    stage = Stage(handler, looks=300)

    stage.run(of_topics(*[("missing", f"k{n}") for n in range(50)], ("good", "k1")), quota=0)

    assert len(handler.calls) <= 2 * (stage.pauses + 1)


@pytest.mark.parametrize("others", [True, False], ids=["the log has more", "the log ends"])
def test_a_batch_of_refused_topics_is_passed_without_a_pause_while_the_log_has_more(others):
    """One of the next messages may be of a topic that is accepted; behind thousands of topics pauses would add up."""
    stage = Stage(Handler(lambda _: Unavailable("no topic")), looks=100, others=others)

    outcome = stage.run(of_topics(("missing", None), ("missing", None), ("unknown", None)))

    assert (ids(outcome.open), stage.pauses == 0) == ([] if others else [1, 2, 3], others)


def test_behind_two_calls_without_an_answer_the_log_goes_on_although_nothing_was_accepted():
    """The topic waits: with a deadline for each of its messages, no other would have its turn for hours."""
    handler = Handler()
    stage = Stage(handler, others=True)
    with hanging(handler, *range(1, 21)):
        outcome = stage.run(messages(*[None] * 20, topic="hole"))
        good = stage.run(messages(None, topic="good", first=21))

    assert (handler.calls, ids(outcome.open), ids(good.done)) == ([[1], [2], [21]], [], [21])
    assert {parking.state for _, parking in outcome.parked} == {"waiting"}
