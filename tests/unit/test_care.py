"""Care after a process that ended: when it is taken, and what becomes of a message under which processes end."""

from datetime import UTC, datetime

import pytest

from outbox.model.lease import Lease, Partition
from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.position import EARLIEST, Progress
from outbox.store.subscriptions.progress import Settled
from outbox.worker.care import is_marked, marked, needs_care, to_be_alone
from outbox.worker.policy import HandlerPolicy

NOW = datetime(2026, 1, 31, tzinfo=UTC)


def settled(epoch: int, n: int) -> Settled:
    return Settled(Progress(EARLIEST), NOW, epoch, n)


@pytest.mark.parametrize(
    ("abandoned", "newest", "needs"),
    [
        (True, settled(6, 1), True),
        (True, settled(5, 9), True),
        (True, settled(6, 2), False),
        (False, settled(6, 1), False),
    ],
    ids=["nothing but its beginning", "nothing", "some", "given back"],
)
def test_care_is_taken_after_a_lease_that_was_not_given_back_and_under_which_nothing_was_settled(
    abandoned, newest, needs
):
    lease = Lease(Partition("relay"), 7, "host:1", abandoned=abandoned)

    assert needs_care(lease, newest) == needs


def test_a_lease_is_the_same_lease_whether_or_not_it_was_given_back():
    left = Lease(Partition("relay"), 7, "host:1", abandoned=True)

    assert {left} == {Lease(Partition("relay"), 7, "host:1")}


def test_under_the_third_end_of_a_process_a_message_is_a_dead_letter():
    """Each mark is an attempt. An error in between begins anew."""
    message, policy = Message("orders", b"1"), HandlerPolicy()
    parkings, error = list[Parking](), to_be_alone(policy).error
    while not parkings or parkings[-1].state != "dead":
        parkings.append(marked(message, error, policy))
        error = parkings[-1].error
        message.attempt += 1

    assert [(each.state, each.attempts, each.error) for each in parkings] == [
        ("retry", 1, "under way alone, because a process ended"),
        ("retry", 2, "under way alone; its process ended once before"),
        ("retry", 3, "under way alone; its process ended twice before"),
        ("dead", 3, "its process ended 3 times while this message was handled"),
    ]
    assert [is_marked(each.error) for each in parkings] == [True, True, True, False]
    assert marked(message, "HTTP 503", policy).error == "under way alone, because a process ended"
