"""Destinations with `async def`: the contract that they pass, and what is theirs alone."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest

from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Retry, Unavailable, Verdict
from outbox.runtime import event_loop
from outbox.runtime.tasks import EndedError
from outbox.senders import asynchronous
from outbox.senders.asynchronous import AsyncFunctionSender, AsyncObjectSender
from outbox.senders.function import FunctionSender
from outbox.senders.key_order import EARLIER
from outbox.senders.opening import open_sender
from outbox.testing.sender_contract import Destination, SenderContract, Stored, a_message
from tests.support.waiting import eventually

#: With the fixture `soon`: a call is cancelled after half a second, and the loop has half a minute to come to that.
LONG = timedelta(seconds=30)


@pytest.fixture
def soon(monkeypatch):
    """A small share of the deadline is the call's own, so that a loop is not taken for stuck on a busy machine."""
    monkeypatch.setattr(asynchronous, "_SHARE", 0.5 / LONG.total_seconds())


class Shelf(Destination):
    """A destination in memory, which an async function writes to."""

    deadline = 60.0

    def __init__(self):
        self.copies: list[Stored] = []
        self._failing: str | None = None
        self._gone = self._mute = self._silent = False

    def open(self):
        """A sender that calls an async function."""

        async def put(message: Message) -> Verdict | None:
            return await self.put(message)

        put.deadline = timedelta(seconds=2)  # type: ignore[attr-defined]
        return open_sender(put)

    async def put(self, message: Message) -> Verdict | None:
        """Keep the message, or fail as it was told."""
        await asyncio.sleep(0)
        if self._gone:
            raise ConnectionError("nobody there")
        if self._silent:
            await asyncio.sleep(3600)
        if message.topic == self._failing:
            return Retry("no such topic")
        fields = ("message_id", "topic", "key", "tags", "headers", "content_type", "body")
        self.copies.append(Stored(**{field: getattr(message, field) for field in fields}))
        if self._mute:
            self._mute = False
            raise TimeoutError("no answer")
        return None

    def stored(self):
        """All copies."""
        return self.copies

    def fail(self, topic):
        """Take the others only."""
        self._failing = topic

    def disappear(self):
        """Refuse everything."""
        self._gone = True

    def fall_silent(self):
        """Never answer."""
        self._silent = True

    def lose_next_answer(self):
        """Keep the next one, and raise."""
        self._mute = True

    def recover(self):
        """Be well again."""
        self._gone = self._mute = self._silent = False


class ShelfOfObjects(Shelf):
    """The same, written to by an object with async methods."""

    def open(self):
        """A sender that calls an async object."""
        return open_sender(Putter(self))


class Putter:
    """An async sender."""

    deadline = timedelta(seconds=2)

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.closed = 0

    async def send(self, messages: Sequence[Message]) -> list[Verdict]:
        """Put one after the other."""
        verdicts: list[Verdict] = []
        stopped = set()
        for message in messages:
            try:
                waits = message.key is not None and message.key in stopped
                verdict = EARLIER if waits else await self._shelf.put(message) or DONE
            except (ConnectionError, TimeoutError) as error:
                verdict = Unavailable(str(error), everything=True)
            if verdict != DONE and message.key is not None:
                stopped.add(message.key)
            verdicts.append(verdict)
        return verdicts

    async def close(self) -> None:
        """Note it."""
        self.closed += 1


class TestAsyncFunction(SenderContract):
    """An async function passes the contract."""

    @pytest.fixture
    def destination(self):
        """A shelf of its own for each test."""
        return Shelf()


class TestAsyncSender(SenderContract):
    """An async sender passes the contract."""

    @pytest.fixture
    def destination(self):
        """A shelf of its own for each test."""
        return ShelfOfObjects()


def test_messages_of_different_keys_are_under_way_at_once_and_those_of_one_are_not():
    under_way: list[str] = []
    most: list[list[str]] = []

    async def function(message: Message) -> None:
        under_way.append(message.body.decode())
        most.append(sorted(under_way))
        await asyncio.sleep(0.05)
        under_way.remove(message.body.decode())

    keys = ["a", "b", None, "a", None]
    sender = AsyncFunctionSender(function)

    assert sender.send([a_message("t", n, key=key) for n, key in enumerate(keys)]) == [DONE] * 5

    assert ["0", "1", "2", "4"] in most
    assert not any({"0", "3"} <= set(each) for each in most)
    sender.close()


def test_not_everything_is_under_way_at_once():
    under_way = most = 0

    async def function(message: Message) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1

    sender = AsyncFunctionSender(function)
    sender.send([a_message("t", n) for n in range(500)])

    assert most == 100
    sender.close()


def test_verdicts_and_exceptions_mean_what_they_mean_for_a_function():
    async def function(message: Message) -> Verdict | None:
        if message.body == b"3":
            raise ValueError("poison")
        return {b"1": None, b"2": Reject("never")}[message.body]

    sender = open_sender(function)
    sent = [a_message("t", n) for n in (1, 2, 3)]

    assert sender.send(sent) == [DONE, Reject("never"), Unavailable("ValueError: poison")]
    with pytest.raises(ValueError, match="poison"):
        sender.send(sent[2:])
    sender.close()


def test_a_timeout_of_the_function_itself_is_its_exception():
    async def function(message: Message) -> None:
        raise TimeoutError("of my own")

    sender = open_sender(function)

    with pytest.raises(TimeoutError, match="of my own"):
        sender.send([a_message("t", 1)])
    sender.close()


def test_a_wrong_answer_is_an_error_that_says_what_is_right():
    async def function(message: Message) -> Verdict | None:
        return True  # type: ignore[return-value]

    sender = open_sender(function)

    with pytest.raises(TypeError, match="must return a verdict or None, not bool"):
        sender.send([a_message("alpha", 1)])
    sender.close()


def test_a_call_past_its_deadline_is_cancelled_and_the_next_one_works():
    cancelled = threading.Event()
    hangs = True

    async def function(message: Message) -> None:
        if hangs:
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.set()

    function.deadline = timedelta(seconds=0.3)  # type: ignore[attr-defined]
    sender = open_sender(function)
    [one] = sender.send([a_message("t", 1)])
    two = sender.send([a_message("t", n) for n in range(3)])

    assert {type(verdict) for verdict in (one, *two)} == {Unavailable}
    assert cancelled.wait(60)
    hangs = False
    assert eventually(lambda: sender.send([a_message("t", 1)]) == [DONE])
    sender.close()


@pytest.mark.storm
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("cleanup", [0.05, 3600], ids=["soon", "too late"])
def test_what_was_cancelled_is_over_when_the_answer_comes(number, cleanup, monkeypatch):
    """What it stores while it handles the cancellation would come behind what is sent again."""
    monkeypatch.setattr(event_loop, "_PATIENCE", 30.0)
    running: set[bytes] = set()

    async def function(message: Message) -> None:
        running.add(message.body)
        try:
            await asyncio.sleep(3600)
        finally:
            try:
                await asyncio.sleep(cleanup)
            finally:
                running.discard(message.body)

    function.deadline = timedelta(seconds=2)  # type: ignore[attr-defined]
    sender = open_sender(function)
    verdicts = sender.send([a_message("t", n) for n in range(number)])

    assert running == set()
    assert [type(verdict) for verdict in verdicts] == [Unavailable] * number
    sender.close()


@pytest.mark.usefixtures("soon")
def test_what_was_stored_although_it_was_cancelled_is_done():
    async def function(message: Message) -> None:
        with suppress(asyncio.CancelledError if message.body == b"1" else ValueError):
            await asyncio.sleep(3600)

    function.deadline = LONG  # type: ignore[attr-defined]
    sender = open_sender(function)
    away = Unavailable("no answer within 0.5 s", everything=True)

    assert sender.send([a_message("t", n, key="k" if n else None) for n in range(3)]) == [away, DONE, away]
    sender.close()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", ["function", "object"])
def test_after_a_hang_the_next_call_is_made_in_the_same_loop(kind):
    """A connection that the destination keeps belongs to it."""
    destination = Cautious()
    sender = open_sender(destination if kind == "object" else destination.put)
    one, several = [a_message("t", 1)], [a_message("t", n) for n in range(3)]
    assert sender.send(one) == [DONE]

    destination.hangs = True
    for sent in (one, several, one):
        assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
    destination.hangs = False

    assert sender.send(one) == [DONE]
    assert destination.closed == 0
    sender.close()
    assert destination.closed == (kind == "object")


class Cautious:
    """It refuses to work in two loops."""

    deadline = LONG

    def __init__(self) -> None:
        self.hangs = False
        self.closed = 0
        self._loop: asyncio.AbstractEventLoop | None = None

        async def put(_message: Message) -> None:
            await self.send([])

        put.deadline = self.deadline  # type: ignore[attr-defined]
        self.put = put

    async def send(self, messages: Sequence[Message]) -> list[Verdict]:
        """Hang, if it should."""
        self._loop = self._loop or asyncio.get_running_loop()
        assert asyncio.get_running_loop() is self._loop
        if self.hangs:
            await asyncio.sleep(3600)
        return [DONE] * len(messages)

    async def close(self) -> None:
        """Note it."""
        self.closed += 1


@pytest.mark.storm
def test_a_pause_of_the_whole_process_in_a_call_costs_no_loop():
    """When it wakes up, the call is past its deadline by every clock; its loop is not stuck."""
    code = """
import asyncio
from datetime import timedelta
from outbox import Message
from outbox.senders.opening import open_sender

loops = set()

async def put(message):
    loops.add(asyncio.get_running_loop())
    if message.body == b"hangs":
        print("begun", flush=True)
        await asyncio.sleep(3600)

put.deadline = timedelta(seconds=10)
sender = open_sender(put)
print([type(sender.send([Message("t", body)])[0]).__name__ for body in ("well", "hangs", "well")], len(loops))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.5)  # until the loop sleeps: before, it knows how long it will sleep, by the time before the pause
        process.send_signal(signal.SIGSTOP)
        time.sleep(11)
        process.send_signal(signal.SIGCONT)

        assert process.stdout.readline() == "['Done', 'Unavailable', 'Done'] 1\n"


def test_closing_ends_a_call_of_another_thread():
    begun = threading.Event()

    async def hang(_message: Message) -> None:
        begun.set()
        await asyncio.sleep(3600)

    sender = AsyncFunctionSender(hang)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.send, [a_message("t", 1), a_message("t", 2)])
        begun.wait()
        sender.close()

        assert waiting.result(60) == [Unavailable("the sender was closed", everything=True)] * 2


def test_an_object_is_closed_in_its_loop_with_the_sender():
    putter = Putter(Shelf())
    sender = open_sender(putter)
    sender.send([a_message("t", 1)])
    before = threading.active_count()

    sender.close()

    assert putter.closed == 1
    assert threading.active_count() == before - 1


def test_a_callable_object_is_a_function_too():
    class Callable:
        async def __call__(self, message: Message) -> None:
            await asyncio.sleep(0)

    sender = open_sender(Callable())

    assert isinstance(sender._sender, AsyncFunctionSender)
    assert sender.send([a_message("t", 1)]) == [DONE]
    sender.close()


def test_what_is_not_async_stays_as_it_is():
    assert isinstance(open_sender(lambda message: None)._sender, FunctionSender)
    assert isinstance(open_sender(Putter(Shelf()))._sender, AsyncObjectSender)


def test_half_an_async_sender_is_refused():
    class Half:
        async def send(self, messages):
            """Never called."""

        def close(self):
            """Never called."""

    with pytest.raises(TypeError, match="Half: write both send and close with async, or none of them"):
        open_sender(Half())


async def cancel_itself() -> None:
    """As a function does that cancels what it has taken for another task."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def leave(error: BaseException) -> None:
    """Raise it."""
    raise error


ENDS = {
    "CancelledError": lambda: leave(asyncio.CancelledError()),
    "CancelledError of itself": cancel_itself,
    "SystemExit: 3": lambda: leave(SystemExit(3)),
    "KeyboardInterrupt: ": lambda: leave(KeyboardInterrupt()),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_would_end_the_loop_is_the_failure_of_its_message(end):
    """The others of its call are sent once, and the loop goes on."""
    called: list[bytes] = []

    async def function(message: Message) -> None:
        called.append(message.body)
        if message.body == b"2":
            await ENDS[end]()

    function.deadline = timedelta(seconds=60)  # type: ignore[attr-defined]
    sent = [a_message("t", n) for n in range(5)]
    sender = open_sender(function)

    verdicts = sender.send(sent)
    with pytest.raises(EndedError, match=end.removesuffix(" of itself")):
        sender.send(sent[2:3])

    failed = Unavailable(f"EndedError: it raised {end.removesuffix(' of itself')}")
    assert verdicts == [failed if n == 2 else DONE for n in range(5)]
    assert sorted(called) == [b"0", b"1", b"2", b"2", b"3", b"4"]
    assert sender.send(sent[:2]) == [DONE, DONE]
    sender.close()


@pytest.mark.parametrize("end", ENDS)
def test_what_would_end_the_loop_is_the_failure_of_an_objects_call(end):
    class Ending:
        deadline = timedelta(seconds=60)

        async def send(self, messages: Sequence[Message]) -> list[Verdict]:
            if len(messages) == 1:
                await ENDS[end]()
            return [DONE] * len(messages)

        async def close(self) -> None:
            pass

    sender = open_sender(Ending())

    with pytest.raises(EndedError, match=end.removesuffix(" of itself")):
        sender.send([a_message("t", 1)])

    assert sender.send([a_message("t", n) for n in range(2)]) == [DONE, DONE]
    sender.close()


def test_a_task_of_the_function_that_ends_the_loop_ends_only_itself():
    tasks = []

    async def function(message: Message) -> None:
        tasks.append(asyncio.create_task(leave(SystemExit(3))))
        await asyncio.sleep(0.01)

    function.deadline = timedelta(seconds=60)  # type: ignore[attr-defined]
    sender = open_sender(function)

    assert sender.send([a_message("t", n) for n in range(3)]) == [DONE] * 3
    assert [type(task.exception()) for task in tasks] == [SystemExit] * 3
    sender.close()
