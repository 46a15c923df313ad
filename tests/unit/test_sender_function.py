"""A function as a destination, the contract that it passes, and the broken senders that the contract catches."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Timer
from types import SimpleNamespace

import pytest

from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Reject, Retry, Unavailable, Verdict, describe
from outbox.senders import function as function_module
from outbox.senders.function import FunctionSender
from outbox.testing.sender_contract import Destination, SenderContract, Stored, a_message


class _Shelf(Destination):
    """A destination in memory, which a function writes to."""

    def __init__(self):
        self.copies: list[Stored] = []
        self._failing: str | None = None
        self._gone = False
        self._mute = False

    def open(self):
        return FunctionSender(self.put)

    def put(self, message: Message) -> Verdict | None:
        if self._gone:
            raise ConnectionError("nobody there")
        if message.topic == self._failing:
            return Retry("no such topic")
        self.keep(message)
        if self._mute:
            self._mute = False
            raise TimeoutError("no answer")
        return None

    def keep(self, message: Message) -> None:
        fields = ("message_id", "topic", "key", "tags", "headers", "content_type", "body")
        self.copies.append(Stored(**{field: getattr(message, field) for field in fields}))

    def stored(self):
        return self.copies

    def fail(self, topic):
        self._failing = topic

    def disappear(self):
        self._gone = True

    def lose_next_answer(self):
        self._mute = True

    def recover(self):
        self._gone = self._mute = False


class TestFunctionSender(SenderContract):
    """A function passes the contract."""

    @pytest.fixture
    def destination(self):
        """A shelf of its own for each test."""
        return _Shelf()


class _BrokenShelf(_Shelf):
    """The same, written to by a sender that breaks its promise."""

    def open(self):
        return self

    def close(self):
        pass


class _GoesOnAfterAFailure(_BrokenShelf):
    def send(self, messages):
        return [self.put(message) or DONE for message in messages]


class _SaysDoneBeforeItIsStored(_BrokenShelf):
    def send(self, messages):
        Timer(0.2, lambda: FunctionSender(self.put).send(messages)).start()
        return [DONE] * len(messages)


class _SwapsVerdicts(_BrokenShelf):
    def send(self, messages):
        return list(FunctionSender(self.put).send(messages))[::-1]


class _LeavesAVerdictOut(_BrokenShelf):
    def send(self, messages):
        return [v for v in FunctionSender(self.put).send(messages) if not isinstance(v, Retry)]


class _ReordersAKey(_BrokenShelf):
    def send(self, messages):
        return list(FunctionSender(self.put).send(list(messages)[::-1]))[::-1]


class _SwallowsAnError(_BrokenShelf):
    def send(self, messages):
        try:
            return FunctionSender(self.put).send(messages)
        except ConnectionError:
            return [DONE] * len(messages)


class _BlamesTheMessage(_BrokenShelf):
    def send(self, messages):
        return [Reject("gone")] * len(messages) if self._gone else FunctionSender(self.put).send(messages)


class _TrimsKeys(_BrokenShelf):
    def send(self, messages):
        return FunctionSender(self.put).send(messages)

    def keep(self, message):
        super().keep(message)
        last = self.copies[-1]
        fields = {field: getattr(last, field) for field in Stored.__slots__}
        self.copies[-1] = Stored(**(fields | {"key": last.key and last.key.strip()}))


class _RenamesACopy(_BrokenShelf):
    def send(self, messages):
        return FunctionSender(self.put).send(messages)

    def keep(self, message):
        if message.attempt > 1:
            message.body += b"!"
        super().keep(message)


ENDS = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]


@pytest.mark.parametrize("end", ENDS, ids=repr)
def test_what_would_end_a_thread_is_the_failure_of_its_message(end):
    """The verdicts on its neighbours stand."""

    def function(message: Message) -> None:
        if message.body == b"2":
            raise end

    with ThreadPoolExecutor(1) as pool:  # as a relay does: Ctrl-C arrives in the main thread
        verdicts = pool.submit(FunctionSender(function).send, [a_message("t", n) for n in range(5)]).result()

    assert verdicts == [Unavailable(describe(end)) if n == 2 else DONE for n in range(5)]


@pytest.mark.parametrize("end", ENDS[:2], ids=repr)
def test_the_end_of_the_program_goes_on_in_the_main_thread(end):
    def function(message: Message) -> None:
        raise end

    with pytest.raises(type(end)):
        FunctionSender(function).send([a_message("t", n) for n in range(5)])


CONTRACT = {name: test for name, test in vars(SenderContract).items() if name.startswith("test_")}


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (_GoesOnAfterAFailure, "test_nothing_of_a_key_is_done_after_its_first_failure"),
        (_SaysDoneBeforeItIsStored, "test_done_means_stored"),
        (_SaysDoneBeforeItIsStored, "test_a_big_call_is_stored_completely"),
        (_SwapsVerdicts, "test_verdicts_are_in_the_order_of_the_messages"),
        (_LeavesAVerdictOut, "test_verdicts_are_in_the_order_of_the_messages"),
        (_ReordersAKey, "test_a_key_keeps_its_order"),
        (_SwallowsAnError, "test_a_destination_that_is_gone_is_unavailable"),
        (_BlamesTheMessage, "test_a_destination_that_is_gone_is_unavailable"),
        (_TrimsKeys, "test_every_field_arrives_exactly"),
        (_RenamesACopy, "test_a_lost_answer_is_followed_by_the_same_message"),
    ],
)
def test_the_contract_catches_a_sender_that(broken, test):
    shelf = broken()

    with pytest.raises(AssertionError):
        CONTRACT[test](SenderContract(), shelf, shelf.open())


def test_none_means_done_and_a_verdict_stays_what_it_is():
    answers = {"1": None, "2": Done(), "3": Retry("later"), "4": Reject("never"), "5": Unavailable("away")}
    sender = FunctionSender(lambda message: answers[message.body.decode()])

    verdicts = sender.send([a_message("alpha", n) for n in range(1, 6)])

    assert verdicts == [DONE, Done(), Retry("later"), Reject("never"), Unavailable("away")]


def test_a_message_that_raises_stops_its_key_and_nothing_else():
    seen: list[str] = []

    def function(message: Message) -> None:
        seen.append(message.body.decode())
        if message.body == b"bad":
            raise ValueError("poison")

    sent = [
        a_message("t", body, key=key) for body, key in [("1", "a"), ("bad", "a"), ("2", "b"), ("3", "a"), ("4", None)]
    ]

    verdicts = FunctionSender(function).send(sent)

    waiting = Unavailable("an earlier message of its key was not stored")
    assert verdicts == [DONE, Unavailable("ValueError: poison"), DONE, waiting, DONE]
    assert seen == ["1", "bad", "2", "4"]


def test_a_message_that_came_alone_raises_through():
    def function(message: Message) -> None:
        raise ValueError("poison")

    with pytest.raises(ValueError, match="poison"):
        FunctionSender(function).send([a_message("alpha", 1)])


@pytest.fixture
def clock(monkeypatch):
    """The clock of the sender, in seconds; only a test moves it."""
    now = [0.0]
    monkeypatch.setattr(function_module, "time", SimpleNamespace(monotonic=lambda: sum(now)))
    return now


def test_a_function_that_waits_for_a_dead_server_is_not_asked_for_every_message(clock):
    asked = []

    def function(message: Message) -> None:
        asked.append(message.body)
        clock.append(2.0)
        raise TimeoutError("no answer")

    verdicts = FunctionSender(function, timeout=timedelta(seconds=5)).send([a_message("t", n) for n in range(1_000)])

    assert asked == [b"0", b"1", b"2"]
    assert {type(verdict) for verdict in verdicts} == {Unavailable}


def test_a_slow_function_that_never_raises_is_asked_for_every_message(clock):
    sender = FunctionSender(lambda message: clock.append(2.0), timeout=timedelta(seconds=5))

    assert sender.send([a_message("t", n) for n in range(10)]) == [DONE] * 10


def test_a_wrong_answer_is_an_error_that_says_what_is_right():
    sender = FunctionSender(lambda message: True)  # type: ignore[arg-type, return-value]

    with pytest.raises(TypeError, match="must return a verdict or None, not bool"):
        sender.send([a_message("alpha", 1)])


def test_its_destination_is_the_function():

    assert FunctionSender(_Shelf().put).destination.endswith("test_sender_function._Shelf.put")
