"""Held keys: the head, what is behind it in order, and how many messages a decision lets go on."""

import asyncio
from datetime import timedelta

import pytest

from outbox import Done, InvalidMessageError, Outbox, Reject, Relay, Retry, SubscriptionError, Verdict
from tests.support.command_line import outbox as run

ANSWERS: dict[str, Verdict] = {"dead": Reject("HTTP 422"), "retry": Retry("not now", after=timedelta(hours=1))}
#: Topics and keys, in the order of the log: key a is held with three messages behind, key b with one, and c flows.
WRITTEN = (("dead", "a"), ("fine", "a"), ("retry", "b"), ("mail", "a"), ("fine", "a"), ("fine", "b"), ("fine", "c"))


class Destination:
    """Answers by topic."""

    destination = "nats://h:4222"

    def send(self, messages):
        """One answer for each topic; a key stops at its first failure."""
        failed: dict[str | None, Verdict] = {}
        answers: list[Verdict] = []
        for message in messages:
            answers.append(failed.get(message.key) or ANSWERS.get(message.topic, Done()))
            if not isinstance(answers[-1], Done):
                failed[message.key] = answers[-1]
        return answers

    def close(self):
        """Nothing is open."""


@pytest.fixture
def holding(engine) -> Outbox:
    """An outbox with two held keys."""
    outbox = Outbox(engine)
    with outbox.begin() as session:
        for topic, key in WRITTEN:
            outbox.send(session, topic, b"1", key=key)
    Relay(outbox, Destination()).until_empty()
    return outbox


def test_the_keys_with_the_most_messages_behind_come_first(holding):
    found = holding.admin.held()

    shown = [(each.subscription, each.key, each.head and each.head.id, each.behind) for each in found]
    assert (shown, holding.admin.held(top=1)) == ([("relay", "a", 1, 3), ("relay", "b", 3, 1)], found[:1])
    assert found[0].head is not None and (found[0].head.error, found[0].head.attempts) == ("HTTP 422", 1)
    assert not any(each.behind_is_minimum or each.pause for each in found)


def test_a_key_shows_what_is_behind_its_head_in_order_and_by_topic(holding):
    (found,) = holding.admin.key("a", limit=2)

    assert found.head is not None
    assert (found.head.id, [each.id for each in found.messages], found.behind) == (1, [2, 4], 3)
    assert dict(found.topics) == {"fine": 2, "mail": 1}


def test_a_decision_on_the_head_lets_go_on_what_was_said(holding):
    (before,) = holding.admin.key("a")
    (done,) = holding.admin.discard(before.head.id, reason="test")
    Relay(holding, Destination()).until_empty()

    assert (done.behind, holding.admin.key("a")) == (before.behind, ())


def test_a_key_that_flows_holds_nothing(holding):
    assert (holding.admin.key("c"), holding.admin.key("c", name="relay")) == ((), ())


def test_a_key_that_a_person_has_paused_says_so_before_any_message_came(holding):
    holding.admin.pause("relay", key="d", by="eve")

    (found,) = holding.admin.key("d")

    assert (found.head, found.behind, found.pause and found.pause.by) == (None, 0, "eve")


def test_a_name_or_a_key_that_cannot_be_is_an_error(holding):
    with pytest.raises(SubscriptionError, match="nope"):
        holding.admin.held(name="nope")
    with pytest.raises(InvalidMessageError, match="key"):
        holding.admin.key("")


def test_the_awaited_forms_and_the_command_line_show_the_same(holding, engine):
    async def awaited():
        return await holding.admin.aheld(), await holding.admin.akey("a")

    keys, (detail,) = asyncio.run(awaited())

    assert (keys, detail) == (holding.admin.held(), holding.admin.key("a")[0])
    listed = run(engine, "parked", "held").out.splitlines()
    assert [line.split()[:5] for line in listed[1:]] == [
        ["relay", "a", "3", "1", "dead"],
        ["relay", "b", "1", "3", "retry"],
    ]
    shown = run(engine, "parked", "key", "a").out.splitlines()
    assert shown[0].startswith(
        "relay: held by message 1 of topic dead: dead letter after 1 failed attempt, set aside 20"
    )
    assert shown[1] == "relay: a decision on message 1 lets 3 messages go on: 2 of fine, 1 of mail"
    assert [line.split()[:2] for line in shown[3:]] == [["2", "fine"], ["4", "mail"], ["5", "fine"]]
    assert run(engine, "parked", "key", "c").err == "no subscription holds key c back\n"
