"""The order in which the messages of one call are offered, and what becomes of those behind a failure."""

import pytest

from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Verdict
from outbox.senders.key_order import EARLIER, Chains, Order, send_again

BAD = Reject("bad")


def messages(*pairs: str) -> list[Message]:
    """Messages of a topic and a key, each written as `topic/key`; without a key as `topic/`."""
    return [Message(pair.split("/")[0], b"", key=pair.split("/")[1] or None) for pair in pairs]


def rounds(
    sent: list[Message], order: Order, bad: frozenset[int] = frozenset()
) -> tuple[list[list[int]], list[Verdict]]:
    """What is offered together, round by round, when each round is answered as a whole; and the verdicts."""
    chains = Chains(sent, most=100, most_bytes=1_000, order=order)
    offered: list[list[int]] = []
    while chains.left:
        together: list[int] = []
        while (index := chains.take()) is not None:
            together.append(index)
        assert together, "messages are left, and none is offered"
        offered.append(together)
        for index in together:
            chains.settle(index, BAD if index in bad else DONE)
    return offered, chains.verdicts()


@pytest.mark.parametrize(
    ("order", "offered"),
    [
        ("each", [[0, 1, 2], [3, 4], [5]]),
        ("first", [[0, 1, 2], [3, 5, 4]]),
        ("none", [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_a_message_waits_for_its_key_as_the_order_says(order, offered):
    sent = messages("t/a", "t/b", "t/", "t/a", "t/b", "t/a")

    assert rounds(sent, order) == (offered, [DONE] * 6)


@pytest.mark.parametrize(
    ("order", "offered"),
    [
        ("each", [[0], [1], [2], [3], [4]]),
        ("first", [[0], [1], [2], [3], [4]]),
        ("none", [[0, 1], [2], [3], [4]]),
    ],
)
def test_from_where_a_key_changes_its_topic_each_message_waits_for_the_one_before(order, offered):
    sent = messages("t/a", "t/a", "other/a", "other/a", "t/a")

    assert rounds(sent, order) == (offered, [DONE] * 5)


@pytest.mark.parametrize("order", ["each", "first"])
def test_what_waits_for_a_message_that_failed_is_not_offered(order):
    sent = messages("t/a", "t/b", "t/a", "t/a", "other/a", "t/b")

    offered, verdicts = rounds(sent, order, bad=frozenset({0}))

    assert offered == [[0, 1], [5]]
    assert verdicts == [BAD, DONE, EARLIER, EARLIER, EARLIER, DONE]


@pytest.mark.parametrize(("order", "overlap"), [("each", False), ("first", True), ("none", True)])
def test_messages_of_a_key_overlap_only_where_they_need_not_wait(order, overlap):
    assert Chains(messages("t/a", "t/a"), most=9, most_bytes=9, order=order).overlap is overlap
    assert not Chains(messages("t/a", "t/b", "t/"), most=9, most_bytes=9, order=order).overlap


@pytest.mark.parametrize("verdict", [DONE, BAD])
def test_many_verdicts_at_once_count_as_one_by_one(verdict):
    sent = messages("t/a", "t/b", "t/", "t/a", "other/b")
    chains = Chains(sent, most=100, most_bytes=1_000, order="none")

    chains.settle_all(chains.take_all(), verdict)

    assert chains.take_all() == ([4] if verdict is DONE else [])
    chains.settle_all([0, 4], DONE)
    assert (chains.left, chains.under_way()) == (0, [])
    assert chains.verdicts() == [verdict] * 4 + [DONE if verdict is DONE else EARLIER]


def test_what_is_not_done_is_sent_again_and_keeps_its_place():
    sent = messages("t/a", "t/b", "t/c", "t/d")
    again: list[list[Message]] = []

    def send(left: list[Message]) -> list[Verdict]:
        again.append(left)
        return [DONE, BAD]

    assert send_again(sent, [DONE, EARLIER, DONE, EARLIER], send) == [DONE, DONE, DONE, BAD]
    assert again == [[sent[1], sent[3]]]
