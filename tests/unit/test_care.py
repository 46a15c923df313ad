"""Care after a process that ended: when it is taken, and what becomes of a message under which processes end."""

from datetime import UTC, datetime

import pytest

from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.position import EARLIEST, Progress
from outbox.store.subscriptions.parked import Ready
from outbox.store.subscriptions.progress import Settled
from outbox.worker.care import Care, needs_care, under_way
from outbox.worker.policy import HandlerPolicy

NOW = datetime(2026, 1, 31, tzinfo=UTC)


def settled(epoch: int, n: int) -> Settled:
    return Settled(Progress(EARLIEST), NOW, epoch, n)


@pytest.mark.parametrize(
    ("newest", "earlier", "needs"),
    [
        (settled(6, 1), set(), True),
        (settled(6, 1), {5}, True),
        (settled(6, 1), {6, 7}, False),
        (settled(6, 2), set(), False),
        (settled(0, 0), set(), False),
    ],
    ids=["nothing but its beginning", "after one of ours", "ours", "some", "a new partition"],
)
def test_care_is_taken_after_another_process_that_began_and_settled_nothing(newest, earlier, needs):
    assert needs_care(newest, earlier) == needs


def test_what_waits_for_its_turn_is_still_handled_alone_afterwards():
    """Another partition of the process handles a message alone for longer than a look takes, again and again."""
    ready = [Ready(Message("orders", b"1", key="a"), expired=False) for _ in range(3)]
    mine, other, alone = Care(HandlerPolicy(), set(), 1000), Care(HandlerPolicy(), set(), 1000), list[int]()
    other.begin(ready[0].message, None)
    for _ in range(4):
        alone.append(len(mine.next(ready)))
        mine.begin(ready[0].message, None)
        mine.end()
    other.end()

    for left in (ready, ready[1:], ready[2:]):
        alone.append(len(mine.next(left)))
        mine.begin(left[0].message, None)
        mine.end()

    assert alone == [1] * 7


def test_under_the_third_end_of_a_process_a_message_is_a_dead_letter():
    """Each mark is an attempt. An error in between begins anew."""
    message, policy = Message("orders", b"1"), HandlerPolicy()
    ((_, parked),) = Care(policy, set(), 1).park([message], "relay")
    parkings, error = list[Parking](), parked.error
    while not parkings or parkings[-1].state != "dead":
        parkings.append(under_way(message, error, policy))
        error = parkings[-1].error
        message.attempt += 1

    assert [(each.state, each.attempts, each.error) for each in parkings] == [
        ("retry", 1, "under way alone, because a process ended"),
        ("retry", 2, "under way alone; its process ended once before"),
        ("retry", 3, "under way alone; its process ended twice before"),
        ("dead", 3, "its process ended 3 times while this message was handled"),
    ]
    assert under_way(message, "HTTP 503", policy).error == "under way alone, because a process ended"
