"""Topics that a destination refuses while it accepts others: they pause, and the others go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from outbox import Message, Outbox, Retry, Unavailable, Verdict
from outbox.model.verdict import DONE
from outbox.store.log.log import Limits
from tests.support.deadlines import overdue_when_hanging
from tests.support.destination import Destination, briskly, relay_to
from tests.support.parked import states
from tests.support.waiting import eventually


def only(*topics: str) -> Destination:
    """A destination that knows these topics alone."""

    def answer(message: Message) -> Verdict:
        return DONE if message.topic in topics else Unavailable(f"no topic {message.topic}")

    return Destination(answer)


@pytest.mark.every_database
@pytest.mark.parametrize("count", [10, 1500])
def test_a_topic_that_is_refused_costs_a_few_calls_whatever_stands_before_the_others(
    engine: Engine, count: int
) -> None:
    """Also when it fills more than a batch."""
    outbox, destination = Outbox(engine), only("good")
    with outbox.begin() as session:
        outbox.send_all(session, [Message("missing", b"", key=f"k{n % 700}" if n % 2 else None) for n in range(count)])
        outbox.send(session, "good", b"1")

    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [b"1"]
    assert destination.calls < 12
    assert sum(states(engine).values()) == count


@pytest.mark.every_database
def test_a_thousand_refused_topics_among_others_cost_one_call_a_batch(engine: Engine) -> None:
    outbox, good = Outbox(engine), [f"good-{n}" for n in range(1000)]
    destination = only(*good)
    with outbox.begin() as session:
        for n in range(1000):
            outbox.send_all(session, [Message(f"missing-{n}", b""), Message(good[n], b"")])

    called: list[bool] = []

    def noting(messages: Sequence[Message]) -> bool:
        """Whether a call has a message that is accepted: others are probes, whose number depends on the time."""
        called.append(any(message.topic in good for message in messages))
        return False

    destination.hanging = noting
    relay_to(destination, outbox).until_empty()

    assert len(destination.bodies) == 1000
    assert sum(called) < 30
    assert states(engine) == {"waiting": 1000}


def test_a_message_of_a_paused_topic_waits_behind_one_of_its_key_that_fails(engine: Engine) -> None:
    """The key has one head, whichever of the two is known first."""

    def answer(message: Message) -> Verdict:
        return (
            Unavailable("no topic") if message.topic == "missing" else Retry("bad") if message.body == b"bad" else DONE
        )

    outbox, destination = Outbox(engine), Destination(answer)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("missing", b"x"), Message("good", b"g")])
        outbox.send_all(session, [Message("good", b"bad", key="k"), Message("missing", b"y", key="k")])

    relay_to(destination, outbox, settings=replace(briskly(), limits=Limits(rows=2))).until_empty()

    assert destination.bodies == [b"g"]
    assert states(engine) == {"waiting": 1, "retry": 1, "behind": 1}


def test_what_waits_for_its_topic_goes_when_the_topic_is_there_in_order(engine: Engine) -> None:
    outbox, destination = Outbox(engine), only("good")
    with outbox.begin() as session:
        outbox.send_all(session, [Message("missing" if n % 3 == 0 else "good", str(n), key="k") for n in range(20)])
        outbox.send(session, "good", b"other")
    relay_to(destination, outbox).until_empty()
    before = destination.bodies

    destination.answer = lambda _message: DONE
    relay_to(destination, outbox).until_empty()

    assert before == [b"other"]
    assert destination.of_key("k") == [str(n).encode() for n in range(20)]
    assert states(engine) == {}


@pytest.mark.every_database
def test_a_topic_for_which_no_answer_comes_is_tried_alone_and_the_others_go_on(engine: Engine) -> None:
    outbox, destination, called = Outbox(engine), Destination(), list[Sequence[Message]]()

    def has_no_answer(messages: Sequence[Message]) -> bool:
        if not any(messages is each for each in called):
            called.append(messages)
        return not released and any(message.topic == "hole" for message in messages)

    destination.hanging, released = has_no_answer, False
    with outbox.begin() as session:
        outbox.send_all(session, [Message(("hole", "good")[n % 2], b"", key=f"k{n}") for n in range(300)])
    relay = relay_to(overdue_when_hanging(destination, deadlines=1), outbox)

    relay.start()
    others = eventually(lambda: len(destination.messages) == 150)
    during = states(engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message(("hole", "good")[n % 2], b"", key=f"later{n}") for n in range(300)])
    others_later = eventually(lambda: len(destination.messages) == 300)
    together = [messages for messages in called if len({message.topic for message in messages}) > 1]
    released = True
    drained = eventually(lambda: len(destination.messages) == 600)
    relay.stop()
    relay.join(60)

    assert (others, others_later, drained) == (True, True, True)
    # A message alone is suspected first, and then its topic.
    assert during.get("dead", 0) + during.get("retry", 0) <= 1
    assert (len(together) <= 1, states(engine)) == (True, {})


def test_topics_that_nobody_has_tried_yet_are_tried_together(engine: Engine) -> None:
    """A batch may have nothing else, and what is accepted stands behind."""
    outbox, destination = Outbox(engine), only("good")
    with outbox.begin() as session:
        outbox.send_all(session, [Message(f"missing-{n}", b"") for n in range(190)])
        outbox.send_all(session, [Message("good", b"1") for n in range(10)])
        outbox.send_all(session, [Message(f"others-{n}", b"") for n in range(200)])
        outbox.send(session, "good", b"2")

    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [b"1"] * 10 + [b"2"]
    # The first calls have 1 and 8 messages; each other one has a message of 50 topics.
    assert destination.calls < 25
    assert states(engine) == {"waiting": 390}
