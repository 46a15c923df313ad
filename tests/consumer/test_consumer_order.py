"""Keys are handled in order, or not at all in order; other keys wait for none, except where the queue is to wait."""

import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from tenacity import wait_fixed

from outbox import Message, Outbox, Retry, RetryPolicy
from tests.support.consumers import consumer_of, parked, texts, until_over, write
from tests.support.deadlines import overdue
from tests.support.leases import step_clock
from tests.support.waiting import eventually


@pytest.fixture
def outbox(engine) -> Outbox:
    """An outbox on every supported database."""
    return Outbox(engine)


def fill(outbox: Outbox, count: int, keys: int) -> None:
    """Message n has key n % keys."""
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", str(n), key=f"k{n % keys}") for n in range(count)])


def test_calls_of_different_keys_are_under_way_at_once_and_never_two_of_a_key(outbox):
    fill(outbox, 60, keys=10)
    consumer, lock, now, most, got = (
        consumer_of(outbox, concurrency=4),
        threading.Lock(),
        Counter[str](),
        [0],
        list[Message](),
    )
    together = threading.Event()

    @consumer.on("orders")
    def handle(message: Message) -> None:
        with lock:
            now[message.key or ""] += 1
            most[0] = max(most[0], now.total())
            assert now[message.key or ""] == 1
            if now.total() > 1:
                together.set()
        assert together.wait(240)
        with lock:
            now[message.key or ""] -= 1
            got.append(message)

    consumer.until_empty()

    assert (2 <= most[0] <= 4, parked(outbox)) == (True, [])
    for key in range(10):
        assert [int(each) for each in texts(got) if int(each) % 10 == key] == list(range(key, 60, 10))


def test_without_order_messages_of_a_key_run_side_by_side_and_none_waits_for_a_failed_one(outbox):
    fill(outbox, 8, keys=1)
    consumer, both, got = consumer_of(outbox, ordered=False, concurrency=4), threading.Barrier(2), list[str]()

    @consumer.on("orders")
    def handle(message: Message) -> None:
        if message.body in (b"2", b"3") and message.attempt == 1:
            both.wait(60)
        if message.body == b"0" and message.attempt == 1:
            raise ValueError("not yet")
        got.append(message.body.decode())

    consumer.once()
    before = sorted(got)
    until_over(consumer)

    assert (before, sorted(got)) == ([*map(str, range(1, 8))], [*map(str, range(8))])


def test_the_queue_waits_where_it_is_to_wait(outbox):
    fill(outbox, 6, keys=3)
    consumer, got = consumer_of(outbox, suspend="queue"), list[str]()

    @consumer.on("orders")
    def handle(message: Message) -> Any:
        got.append(f"{message.body.decode()}#{message.attempt}")
        return Retry("not yet") if message.body == b"1" and message.attempt < 3 else None

    until_over(consumer)

    assert got == ["0#1", "1#1", "1#2", "1#3", "2#1", "3#1", "4#1", "5#1"]


def test_until_empty_ends_when_the_queue_waits_for_a_later_moment(outbox):
    """It would take as long as the pause, and for an orderly listener that never accepts without end."""
    fill(outbox, 3, keys=1)
    patient = RetryPolicy(attempts=3, wait=wait_fixed(3_600))
    consumer, got = consumer_of(outbox, suspend="queue", retry=patient), list[str]()

    @consumer.on("orders")
    def handle(message: Message) -> Any:
        got.append(f"{message.body.decode()}#{message.attempt}")
        return Retry("not yet") if message.body == b"1" and message.attempt == 1 else None

    consumer.until_empty()
    before = list(got)
    step_clock(outbox.engine, timedelta(hours=1), "outbox_parked.due_at")
    consumer.until_empty()

    assert (before, got) == (["0#1", "1#1"], ["0#1", "1#1", "1#2", "2#1"])


def test_a_pause_is_chosen_for_each_message(outbox):
    write(outbox, "1")
    consumer, got = consumer_of(outbox, retry=RetryPolicy(attempts=3, wait=wait_fixed(60))), list[int]()

    @consumer.on("orders")
    def handle(message: Message) -> Any:
        got.append(message.attempt)
        return Retry("soon", after=timedelta(hours=1)) if message.attempt == 1 else Retry("as usual")

    tried = list[int]()
    for passed in (timedelta(0), timedelta(minutes=50), timedelta(minutes=10), timedelta(minutes=1)):
        step_clock(outbox.engine, passed, "outbox_parked.due_at")
        consumer.until_empty()
        tried.append(len(got))

    assert tried == [1, 1, 2, 3]


def test_a_call_that_hangs_holds_its_message_alone(outbox):
    """The rest of the batch goes on; the key waits until the call has come back, however often others are tried."""
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", f"{key}{n}", key=key) for n in range(2) for key in ("a", "b", "c")])
    consumer, go_on, hangs, got = consumer_of(outbox), threading.Event(), list[bytes](), list[str]()

    @consumer.on("orders")
    def handle(message: Message) -> Any:
        if message.body == b"a0" and not hangs:
            hangs.append(message.body)
            go_on.wait(240)
        if message.body == b"c1" and message.attempt < 3:
            return Retry("not yet")
        got.append(f"{message.text()} {message.attempt}")
        return None

    with overdue(lambda messages: any(each.body in hangs for each in messages)), consumer:
        others = eventually(lambda: sorted(got) == ["b0 1", "b1 1", "c0 1", "c1 3"])
        beside = list(got)
        go_on.set()
        assert eventually(lambda: got[-1] == "a1 1")

    assert (others, [each for each in beside if each.startswith("a")]) == (True, [])
    assert got[4:] == ["a0 1", "a1 1"]


def test_a_poison_message_delays_no_other_key(outbox):
    fill(outbox, 200, keys=20)
    consumer, got = consumer_of(outbox), Counter[str]()

    @consumer.on("orders")
    def handle(message: Message) -> None:
        if message.key == "k7":
            raise ValueError("poison")
        got[message.key or ""] += 1

    until_over(consumer)

    assert got == {f"k{key}": 10 for key in range(20) if key != 7}
    assert Counter(state for state, _, _ in parked(outbox)) == {"dead": 1, "behind": 9}


def test_of_what_waits_only_the_newest_of_a_key_is_handled(outbox):
    fill(outbox, 9, keys=3)
    consumer, got = consumer_of(outbox, compact=True), list[Message]()
    consumer.on("orders")(got.append)

    consumer.until_empty()

    assert texts(got) == ["6", "7", "8"]
