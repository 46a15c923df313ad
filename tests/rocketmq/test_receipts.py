"""Receipts: what whoever received messages may decide on them, of many by one statement, and until when."""

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest

from outbox import Outbox
from outbox.store.subscriptions.receipts import Receipt, Receipts
from tests.rocketmq.test_pops import begun
from tests.rocketmq.test_simple_consumer import HOUR, send, texts
from tests.support.leases import step_clock
from tests.support.parked import states

SECOND = timedelta(seconds=1)


@pytest.fixture
def receipts(outbox: Outbox) -> Iterator[Receipts]:
    """The receipts of the group."""
    with closing(outbox.database.open()) as channel:
        yield Receipts(channel, "billing")


def received(outbox: Outbox, *bodies: str) -> list[Receipt]:
    """The receipts of messages that are in hands for an hour."""
    consumer = begun(outbox)
    send(outbox, *bodies)
    return [Receipt(each.queue_offset, each.receipt_handle or "") for each in consumer.receive(32, HOUR)]


def test_one_statement_takes_receipts_of_many_and_says_which_were_valid(engine, outbox):
    consumer = begun(outbox, fifo=True)
    for key in "abcd":
        send(outbox, f"{key}1", f"{key}2", key=key)
    held = {each.body[:1].decode(): each for _ in "abcd" for each in consumer.receive(1, HOUR)}
    receipts = {key: Receipt(each.queue_offset, each.receipt_handle or "") for key, each in held.items()}
    stale = receipts["a"]._replace(error="handed out under receipt 1")

    with closing(outbox.database.open()) as channel:
        group = Receipts(channel, "billing")
        found = [
            group.postpone([receipts["a"], stale], HOUR),
            group.ack([stale, receipts["a"], receipts["b"]]),
            group.ack([receipts["a"]]),
            group.dead_letter([receipts["c"], receipts["a"]], "too hot"),
        ]

    ids = {key: each.id for key, each in receipts.items()}
    assert found == [{ids["a"]}, {ids["a"], ids["b"]}, set(), {ids["c"]}]
    (dead,) = outbox.admin.parked(name="billing", state="dead")
    assert (dead.error, states(engine)) == ("too hot", {"retry": 4, "dead": 1})
    assert texts(consumer.receive(32, HOUR)) == ["a2", "b2", "c2"]


@pytest.mark.every_database
def test_messages_that_are_given_back_come_again_as_if_nobody_had_received_them(outbox):
    consumer = begun(outbox, fifo=True, max_attempts=1)
    for key in "ab":
        send(outbox, f"{key}1", f"{key}2", key=key)
    found = consumer.receive(4, HOUR)
    receipts = [Receipt(each.queue_offset, each.receipt_handle or "") for each in found]
    stale = receipts[0]._replace(error="handed out under receipt 1")

    with closing(outbox.database.open()) as channel:
        group = Receipts(channel, "billing")
        given = [group.give_back([*receipts, stale]), group.give_back(receipts), group.ack(receipts)]

    again = consumer.receive(4, HOUR)
    assert given == [{each.id for each in receipts}, set(), set()]
    assert [(each.body, each.reconsume_times) for each in again] == [(each.body, 0) for each in found]
    assert texts(again) == ["a1", "a2", "b1", "b2"]


@pytest.mark.every_database
def test_a_time_is_moved_from_the_moment_that_was_written_and_from_no_other(outbox, receipts):
    first, second = received(outbox, "1", "2")
    begin = receipts.times([first, second])
    due = begin[first]
    receipts.postpone([second], 2 * HOUR)
    later = due + SECOND

    moved = [receipts.renew({first: (due, later), second: (due, later)}, HOUR) for _ in range(2)]
    moved.append(receipts.renew({first: (due, later + SECOND)}, HOUR))
    moved.append(receipts.renew({first._replace(error="strange"): (later, due)}, HOUR))

    times = receipts.times([first, second, second._replace(id=0), first._replace(error="strange")])
    assert moved == [{first}, {first}, set(), set()]
    assert (times[first], times[second] > due + HOUR / 2, len(times)) == (later, True, 2)


def test_a_time_that_is_over_is_not_moved(engine, outbox, receipts):
    (first,) = received(outbox, "1")
    (due,) = receipts.times([first]).values()
    step_clock(engine, 2 * HOUR, "outbox_parked.due_at")

    moved = receipts.renew({first: (due - 2 * HOUR, due)}, HOUR)

    assert (moved, receipts.times([first])) == (set(), {})


def test_a_time_that_a_clock_which_was_set_back_has_left_far_ahead_is_not_moved_further(outbox, receipts):
    (first,) = received(outbox, "1")
    (due,) = receipts.times([first]).values()

    receipts.renew({first: (due, due + SECOND)}, 10 * SECOND)
    (moved,) = receipts.times([first]).values()

    assert (due - moved) > HOUR / 2
    assert receipts.renew({first: (due + SECOND, due + 2 * SECOND)}, 10 * SECOND) == set()
