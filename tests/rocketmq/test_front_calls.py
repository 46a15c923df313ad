"""Calls of a front that wait: for the database in threads, for messages, and together."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from outbox import Message
from outbox.rocketmq.asked import Asked
from outbox.rocketmq.front.calls import Threads, regularly
from outbox.rocketmq.front.catalog import Catalog
from outbox.rocketmq.front.clients import ClientPolicy
from outbox.rocketmq.front.group_subscriptions import GroupSubscriptions
from outbox.rocketmq.front.joining import Joining
from outbox.rocketmq.front.polls import Polls, Popped
from outbox.rocketmq.front.protocol import RPCS
from outbox.rocketmq.front.statuses import RefusedError, line_of
from outbox.store.subscriptions.receipts import Receipts

SECOND = timedelta(seconds=1)


# Threads


def test_a_call_that_is_cancelled_counts_until_its_thread_is_free_and_its_result_is_not_lost():
    threads, begun, may_end, left = Threads(1, 0), threading.Event(), threading.Event(), list[str]()

    def work() -> str:
        begun.set()
        may_end.wait(60)
        return "late"

    async def story() -> str:
        call = asyncio.create_task(threads.run(work, unwanted=left.append))
        await asyncio.to_thread(begun.wait, 60)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        with pytest.raises(RefusedError) as refused:
            await threads.run(lambda: "too many")
        return refused.value.text

    text = asyncio.run(story())
    may_end.set()
    threads.close()

    assert (text, left) == ("too many calls wait for the database", ["late"])


def test_a_result_that_comes_together_with_the_end_of_its_call_is_not_lost():
    threads, left = Threads(1), list[str]()

    async def story() -> None:
        call = asyncio.create_task(threads.run(lambda: "late", unwanted=left.append))
        await asyncio.sleep(0)
        threads.close()  # the result is there, and the call has not seen it
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    asyncio.run(story())
    threads.close()

    assert left == ["late"]


@pytest.mark.parametrize("raised", [StopIteration, GeneratorExit, asyncio.CancelledError, SystemExit])
def test_a_call_ends_with_an_error_whatever_its_function_raises(raised):
    """An event loop cannot take some of them, ends by others, and no handler expects them."""

    def work(_items: Sequence[int] = ()) -> Sequence[int]:
        raise raised

    threads = Threads(1)

    async def story() -> Sequence[object]:
        joining = Joining(threads, work)
        async with asyncio.timeout(30):
            return await asyncio.gather(threads.run(work), joining.call([1]), joining.call([2]), return_exceptions=True)

    errors = asyncio.run(story())
    threads.close()

    assert [str(each) for each in errors] == [f"{raised.__name__} in a thread of the front"] * 3


def test_a_thread_that_cannot_begin_is_not_counted(monkeypatch):
    """The machine has no thread left for a moment."""
    threads, ran = Threads(1), list[str]()

    def fails(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def story() -> str:
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start"):
            patched.setattr(threading.Thread, "start", fails)
            await threads.run(lambda: ran.append("refused"))
        async with asyncio.timeout(10):
            return await threads.run(lambda: "done")

    result = asyncio.run(story())
    threads.close()

    assert (result, ran) == ("done", [])


def test_what_hangs_is_left_behind_and_ends_as_if_nothing_were(caplog):
    threads, begun, may_end, left = Threads(2), threading.Event(), threading.Event(), SimpleQueue[str]()

    def work() -> str:
        begun.set()
        may_end.wait(60)
        return "late"

    async def story() -> None:
        call = asyncio.create_task(threads.run(work, unwanted=left.put))
        await asyncio.to_thread(begun.wait, 60)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    asyncio.run(story())
    threads.close(0)
    may_end.set()

    assert left.get(timeout=60) == "late"
    assert caplog.messages == ["front: 1 calls of the database have not ended, and are left behind"]


# Calls that wait for messages


class Popping:
    """A pop that ends when a test says so, and what is given back."""

    def __init__(self) -> None:
        self.given = list[tuple[str, list[bytes]]]()
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        #: A call that is cancelled when its answer is there, before the call sees it.
        self.gone: asyncio.Task[Any] | None = None
        self.polls = Polls(self._pop, self._give_back, lambda _wake: nullcontext(), asyncio.Semaphore())

    def call(self) -> asyncio.Task[Any]:
        """Begin a call that waits for a message."""
        return asyncio.create_task(self.polls.messages(Asked(1, SECOND), 60))

    async def _pop(self, asked: Sequence[Asked]) -> Popped:
        self.began.set()
        await self.may_end.wait()
        if self.gone is not None:
            asyncio.get_running_loop().call_soon(self.gone.cancel)
        return Popped("r", [[Message("orders", str(n))] for n, _ in enumerate(asked)])

    def _give_back(self, popped: Popped) -> None:
        self.given.append((popped.receipt, [each.body for some in popped.messages for each in some]))


async def ended(call: asyncio.Task[Any]) -> Any:
    """The messages of a call, or none of one that was cancelled."""
    await asyncio.wait({call})
    return None if call.cancelled() else [each.body for each in call.result()[1]]


def told(story: Callable[[Popping], Any]) -> tuple[list[Any], list[tuple[str, list[bytes]]]]:
    """What calls of a story got, and what was given back."""

    async def tell() -> tuple[list[Any], list[tuple[str, list[bytes]]]]:
        popping = Popping()
        calls = await story(popping)
        return [await ended(each) for each in calls], popping.given

    return asyncio.run(tell())


@pytest.mark.parametrize("moment", ["during the pop", "when the answer is there"])
def test_messages_of_a_call_that_ends_are_given_back_and_others_get_theirs(moment):
    async def story(popping: Popping) -> Any:
        gone, stays = popping.call(), popping.call()
        if moment == "during the pop":
            await popping.began.wait()
            gone.cancel()
        else:
            popping.gone = gone
        popping.may_end.set()
        return gone, stays

    assert told(story) == ([None, [b"1"]], [("r", [b"0"])])


def test_a_call_that_may_have_no_messages_now_waits_and_ends_with_nothing_while_others_get_theirs():
    async def story(popping: Popping) -> Any:
        popping.may_end.set()
        barred = popping.polls.messages(Asked(1, SECOND), 0.1, may=lambda: False)
        return asyncio.create_task(barred), popping.call()

    assert told(story) == ([[], [b"0"]], [])


def test_a_call_gets_nothing_of_a_pop_that_would_begin_before_another_pop_is_counted():
    """A client calls for many groups at once, and its messages are counted when each call goes on."""
    turns, taken = asyncio.Semaphore(), list[Message]()

    async def pop(_asked: Sequence[Asked]) -> Popped:
        await asyncio.sleep(0)
        return Popped("r", [[Message("orders", b"large")]])

    async def receive() -> None:
        polls = Polls(pop, lambda _popped: None, lambda _wake: nullcontext(), turns)
        taken.extend((await polls.messages(Asked(1, SECOND), 0.1, may=lambda: not taken))[1])

    async def story() -> None:
        await asyncio.gather(receive(), receive())

    asyncio.run(story())

    assert [each.body for each in taken] == [b"large"]


def test_calls_that_wait_fail_if_hints_cannot_be_heard():
    """The machine has no thread left, perhaps. A call without an answer would wait for ever."""

    def hints(_wake: object) -> Any:
        raise RuntimeError("can't start new thread")

    async def pop(_asked: Sequence[Asked]) -> Popped:
        raise AssertionError

    async def story() -> Sequence[object]:
        polls = Polls(pop, lambda _popped: None, hints, asyncio.Semaphore())
        async with asyncio.timeout(10):
            calls = [polls.messages(Asked(1, SECOND), 60) for _ in range(2)]
            return await asyncio.gather(*calls, return_exceptions=True)

    assert [*map(repr, asyncio.run(story()))] == ["""RuntimeError("can't start new thread")"""] * 2


def test_at_an_end_all_calls_are_answered_and_what_a_pop_hands_out_meanwhile_is_given_back():
    async def story(popping: Popping) -> Any:
        waits = popping.call()
        await popping.began.wait()
        popping.polls.end()
        answered = await asyncio.wait({waits})
        popping.may_end.set()
        while popping.polls.waits:
            await asyncio.sleep(0)
        return answered[0]

    assert told(story) == ([[]], [("r", [b"0"])])


def test_the_items_of_a_call_and_of_those_that_wait_beside_it_go_together():
    runs, threads = list[list[int]](), Threads(1)

    def run(items: Sequence[int]) -> list[int]:
        runs.append(list(items))
        return [10 * each for each in items]

    async def story() -> Sequence[list[int]]:
        joining = Joining(threads, run)
        return await asyncio.gather(joining.call([1, 2, 3]), joining.call([4]), joining.call([]))

    results = asyncio.run(story())
    threads.close()

    assert ([*results], runs) == ([[10, 20, 30], [40], []], [[1, 2, 3, 4]])


def test_what_is_large_goes_alone_and_an_error_is_that_of_its_item():
    runs, threads = list[list[int]](), Threads(1)

    def run(items: Sequence[int]) -> list[int | Exception]:
        runs.append(list(items))
        return [ValueError(each) if each == 3 else each for each in items]

    async def story() -> Sequence[object]:
        joining = Joining(threads, run, size=lambda item: item, most=10)
        return await asyncio.gather(*(joining.call([each]) for each in (2, 3, 5, 1, 100, 4)), return_exceptions=True)

    results = asyncio.run(story())
    threads.close()

    assert runs == [[2, 3, 5], [1], [100], [4]]
    assert list(map(str, results)) == ["[2]", "3", "[5]", "[1]", "[100]", "[4]"]


def test_items_of_a_call_that_is_given_up_do_not_wait_and_more_calls_than_may_wait_are_refused(monkeypatch):
    monkeypatch.setattr("outbox.rocketmq.front.joining.MOST_WAITING", 2)
    runs, threads, may_end = list[list[int]](), Threads(1), threading.Event()

    def run(items: Sequence[int]) -> list[int]:
        runs.append(list(items))
        may_end.wait(60)
        return [*items]

    async def story() -> str:
        joining = Joining(threads, run)
        runs_now = asyncio.create_task(joining.call([1]))
        while not runs:
            await asyncio.sleep(0)
        waits = asyncio.create_task(joining.call([2]))
        await asyncio.sleep(0)
        with pytest.raises(RefusedError) as refused:
            await joining.call([3])
        waits.cancel()
        await asyncio.wait({waits})
        last = asyncio.create_task(joining.call([4]))
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(runs_now, last)
        return refused.value.text

    text = asyncio.run(story())
    threads.close()

    assert (text, runs) == ("too many calls wait for the database", [[1], [4]])


# Errors of the database


def failing(*_: object) -> Any:
    """Fail as a statement does whose parameters are a client's message."""
    cause = sqlite3.IntegrityError("no more room\nFailing row: s3cret")
    raise IntegrityError("INSERT INTO outbox_message", {"body": b"s3cret"}, cause)


def test_what_a_front_logs_of_an_error_of_the_database_is_one_line_without_the_message(outbox, monkeypatch, caplog):
    threads, subscriptions = Threads(1), GroupSubscriptions(outbox)
    monkeypatch.setattr(Receipts, "give_back", failing)

    async def story() -> None:
        async def fails() -> None:
            failing()

        running = asyncio.create_task(regularly(0, fails, "clients were not noted"))
        while not caplog.messages:
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(story())
    subscriptions.of("billing", "orders").give_back(Popped("r", [[Message("orders", "1")]]))
    subscriptions.close(0)
    threads.close()

    assert caplog.messages == [f"front: {what}: IntegrityError: no more room" for what in (
        "clients were not noted, trying again",
        "messages of a call that has ended were not given back",
    )]  # fmt: skip


def test_each_call_that_waits_for_the_rows_of_topics_fails_if_they_cannot_be_read():
    """Else the client would be told that there is no such topic."""
    rows: Any = type("Failing", (), {"call": failing})()

    async def story() -> list[object]:
        catalog = Catalog(rows, threads, ClientPolicy())
        asked = RPCS["QueryRoute"].request(topic={"name": "new"})
        return await asyncio.gather(*(catalog.look(asked) for _ in range(3)), return_exceptions=True)

    threads = Threads(1)
    found = asyncio.run(story())
    threads.close()

    assert [type(each) for each in found] == [IntegrityError] * 3


def test_an_error_that_was_not_foreseen_is_one_line_too():
    assert line_of(ValueError("a\nb")) == "ValueError: a b"
