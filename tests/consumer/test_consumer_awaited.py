"""Functions written with async run in one loop: side by side, keys in order, each cancelled at its deadline."""

import asyncio
import threading
from typing import Any

import pytest

from outbox import Consumer, Message, Outbox, Retry
from tests.support.consumers import consumer_of, parked, texts, until_over, write
from tests.support.deadlines import an_hour_passes, overdue
from tests.support.waiting import eventually


@pytest.fixture
def outbox(engine) -> Outbox:
    """An outbox on every supported database."""
    return Outbox(engine)


def test_coroutines_of_different_keys_run_side_by_side_and_never_more_than_allowed(outbox):
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", f"{n}", key=f"k{n % 10}") for n in range(60)])
    consumer, now, most, got = consumer_of(outbox, concurrency=4), set[str | None](), list[int](), list[Message]()
    together = asyncio.Event()

    @consumer.on("orders")
    async def handle(message: Message) -> None:
        assert message.key not in now
        now.add(message.key)
        most.append(len(now))
        if len(now) > 1:
            together.set()
        await together.wait()
        await asyncio.sleep(0)
        now.discard(message.key)
        got.append(message)

    consumer.until_empty()
    consumer.close()

    assert (2 <= max(most) <= 4, parked(outbox)) == (True, [])
    assert {key: [m for m in texts(got) if int(m) % 10 == key] for key in range(10)} == {
        key: [str(n) for n in range(key, 60, 10)] for key in range(10)
    }


def test_all_run_in_one_loop_of_one_thread(outbox):
    write(outbox, *map(str, range(20)))
    consumer, where = consumer_of(outbox, concurrency=8), set[tuple[str, int]]()

    @consumer.on("orders")
    async def handle(message: Message) -> None:
        where.add((threading.current_thread().name, id(asyncio.get_running_loop())))

    consumer.until_empty()
    consumer.until_empty()

    assert [name for name, _ in where] == ["outbox-consumer"]
    consumer.close()


def test_functions_of_both_kinds_keep_the_order_of_a_key(outbox):
    with outbox.begin() as session:
        outbox.send_all(session, [Message(("orders", "mail")[n % 2], str(n), key="k") for n in range(6)])
    consumer, got = consumer_of(outbox, concurrency=4), list[Message]()

    @consumer.on("orders")
    async def awaited(message: Message) -> None:
        await asyncio.sleep(0)
        got.append(message)

    consumer.on("mail")(got.append)
    consumer.until_empty()
    consumer.close()

    assert texts(got) == ["0", "1", "2", "3", "4", "5"]


def test_a_coroutine_is_cancelled_at_its_deadline_and_its_message_comes_again(outbox):
    write(outbox, "1", "2", key="k")
    write(outbox, "3", key="other")
    consumer, cancelled, got = consumer_of(outbox), list[str](), list[Message]()

    @consumer.on("orders")
    async def handle(message: Message) -> None:
        if message.body == b"1" and message.attempt == 1:
            an_hour_passes()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.body.decode())
                raise
        got.append(message)

    until_over(consumer)
    consumer.close()

    assert (cancelled, [(m.body, m.attempt) for m in got if m.key == "k"]) == (["1"], [(b"1", 2), (b"2", 1)])
    assert "3" in texts(got)


def test_a_result_that_comes_while_the_coroutine_is_cancelled_counts(outbox):
    write(outbox, "1")
    consumer, calls = consumer_of(outbox), list[int]()

    @consumer.on("orders")
    async def handle(message: Message) -> None:
        calls.append(message.attempt)
        an_hour_passes()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    until_over(consumer)
    consumer.close()

    assert (calls, parked(outbox)) == ([1], [])


async def cancels_itself(_message: Message) -> None:
    raise asyncio.CancelledError


async def ends(_message: Message) -> None:
    raise SystemExit(3)


async def times_out(_message: Message) -> None:
    raise TimeoutError("the bank")


async def odd(_message: Message) -> Any:
    return "fine"


FAILURES = [
    (cancels_itself, "EndedError: it raised CancelledError"),
    (ends, "EndedError: it raised SystemExit: 3"),
    (times_out, "TimeoutError: the bank"),
    (odd, "odd returned str; let the handler return"),
]


@pytest.mark.parametrize(("function", "text"), FAILURES)
def test_a_failure_is_the_messages_and_ends_neither_loop_nor_worker(outbox, function, text):
    write(outbox, "1")
    consumer, got = consumer_of(outbox), list[Message]()
    consumer.on("orders")(function)

    @consumer.on("mail")
    async def handle(message: Message) -> None:
        got.append(message)

    consumer.once()
    ((state, attempts, error),) = parked(outbox)
    write(outbox, "2", topic="mail")
    consumer.until_empty()
    consumer.close()

    assert (state, attempts, text in (error or ""), texts(got)) == ("retry", 1, True, ["2"])


def test_a_coroutine_that_times_out_cancels_no_other(outbox):
    write(outbox, "late", key="a")
    write(outbox, "well", key="b")
    consumer, got = consumer_of(outbox, concurrency=2), list[str]()
    both, failed = asyncio.Event(), asyncio.Event()

    @consumer.on("orders")
    async def handle(message: Message) -> None:
        if message.body == b"late" and message.attempt == 1:
            await both.wait()
            asyncio.get_running_loop().call_soon(failed.set)
            raise TimeoutError("the bank")
        both.set()
        await failed.wait()
        got.append(f"{message.text()} {message.attempt}")

    until_over(consumer)
    consumer.close()

    assert sorted(got) == ["late 2", "well 1"]


def test_a_coroutine_that_blocks_holds_its_key_until_it_returns(outbox):
    """No cancellation reaches it: the same message is never handled twice at once, however often others are tried."""
    write(outbox, "1", "2", key="k")
    consumer, go_on, blocking, got = consumer_of(outbox), threading.Event(), list[bytes](), list[str]()

    @consumer.on("orders")
    async def handle(message: Message) -> None:
        if message.body == b"1" and not blocking:
            blocking.append(message.body)
            go_on.wait(240)
        got.append(f"{message.text()} {message.attempt}")

    @consumer.on("mail")
    def told(message: Message) -> Retry | None:
        got.append(f"mail {message.attempt}")
        return Retry("not yet") if message.attempt < 3 else None

    with overdue(lambda messages: any(each.body in blocking for each in messages)), consumer:
        held = eventually(lambda: [state for state, _, _ in parked(outbox)] == ["retry", "behind"])
        write(outbox, "mail", topic="mail")
        others = eventually(lambda: "mail 3" in got)
        beside = list(got)
        go_on.set()
        assert eventually(lambda: got[-1] == "2 1")

    assert (held, others, beside) == (True, True, ["mail 1", "mail 2", "mail 3"])
    assert got[3:] == ["1 1", "2 1"]


def test_the_thread_of_the_loop_ends_with_the_consumer(outbox):
    write(outbox, "1")
    consumer = consumer_of(outbox)

    @consumer.on("orders")
    async def handle(message: Message) -> None:
        """Nothing to do."""

    consumer.until_empty()
    before = loops()
    consumer.close()

    assert (before, loops()) == (1, 0)


def loops() -> int:
    """The loops of consumers in this process."""
    return sum(thread.name == "outbox-consumer" for thread in threading.enumerate())


def test_an_object_with_an_async_call_is_awaited(outbox):
    write(outbox, "1")
    got: list[Message] = []

    class Handler:
        async def __call__(self, message: Message) -> None:
            got.append(message)

    consumer: Consumer = consumer_of(outbox)
    consumer.on("orders")(Handler())
    consumer.until_empty()
    consumer.close()

    assert texts(got) == ["1"]
