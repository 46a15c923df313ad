"""What is to begin anew in a child does so there, and nowhere else."""

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outbox import Message, Outbox, Verdict, create_engine
from outbox.model.verdict import DONE
from outbox.rocketmq.connections import Connections
from outbox.rocketmq.questions import Respondent, Unasked
from outbox.runtime import fork
from outbox.runtime.stop import Stop
from outbox.runtime.wakeup import Wake
from outbox.worker.calls import Call, Caller
from outbox.worker.hung import HungCalls
from outbox.worker.worker import Worker
from tests.support.stub_server import StubServer


class Thing:
    """Belongs to one process."""

    def __init__(self) -> None:
        self.owner = "parent"
        fork.in_child(self.reset)

    def reset(self) -> None:
        """As in a child."""
        self.owner = "child"


def in_a_child(question: Callable[[], bool]) -> bool:
    """What a child that is forked here says."""
    child = os.fork()
    if not child:
        # Not even an error may leave it: the tests would go on in two processes. Whatever waits for ever is ended.
        signal.alarm(20)
        try:
            os._exit(0 if question() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def calls(monkeypatch):
    """The registry of this test."""
    monkeypatch.setattr(fork, "_calls", {})
    return fork._calls


@pytest.mark.usefixtures("calls")
def test_a_child_begins_anew_and_its_parent_does_not():
    thing = Thing()

    assert in_a_child(lambda: thing.owner == "child")
    assert thing.owner == "parent"


@pytest.mark.usefixtures("calls")
def test_a_child_of_a_child_does_so_as_well():
    thing = Thing()

    def its_child_too() -> bool:
        thing.owner = "a grandchild's parent"
        return in_a_child(lambda: thing.owner == "child")

    assert in_a_child(its_child_too)


def test_whatever_is_gone_is_forgotten(calls):
    thing = Thing()
    gone = weakref.ref(thing)
    del thing
    gc.collect()

    assert gone() is None
    assert calls == {}


@pytest.mark.usefixtures("calls")
def test_what_fails_does_not_stop_the_others():
    def fails() -> None:
        raise ValueError

    things = [Thing() for _ in range(5)]
    fork.in_child(fails)
    things += [Thing() for _ in range(5)]

    assert in_a_child(lambda: all(thing.owner == "child" for thing in things))


def test_a_worker_has_another_owner_there():
    """Else the child would take its parent's lease for its own."""
    worker = Worker(Outbox(create_engine("sqlite:///never-opened")).database, [], stop=Stop())
    owner = worker.owner

    assert in_a_child(lambda: worker.owner != owner)
    assert worker.owner == owner


def test_calls_that_hang_stay_with_the_parent():
    """Their threads do, so nothing would ever end them in the child."""
    hung = HungCalls()
    hung.add(Call([Message("orders", b"1", key="k")]))

    assert in_a_child(lambda: not hung and not hung.held(ordered=True))
    assert hung.held(ordered=True).keys == {"k"}


def test_a_turn_that_a_call_has_is_free_there():
    over = threading.Event()
    caller = Caller()

    def handler(messages: Sequence[Message]) -> list[Verdict]:
        return [DONE] if over.wait(60) else []

    caller.begin(Call([Message("orders", b"of the parent")]), handler)

    def is_free() -> bool:
        call = Call([Message("orders", b"of the child")])
        caller.begin(call, handler)
        return call.started is not None

    assert in_a_child(is_free)
    over.set()


def test_a_producers_connections_stay_with_the_parent():
    """Also the one that the parent is using: its child waits for none."""
    connections = Connections(lambda: cast("Any", SimpleNamespace()), 1)

    def opens_its_own() -> bool:
        with connections.one() as other:
            return other is not channel

    with connections.one() as channel:
        assert in_a_child(opens_its_own)


def test_open_questions_stay_with_the_parent():
    """Their threads do: in the child nobody would answer them. It may ask about the same transaction."""
    let_go = threading.Event()
    row = Message("half", b"", key="transaction")
    respondent = Respondent(lambda _row: let_go.wait(60), threads=1, seconds=3600)
    respondent._lock.acquire()
    child_asks = partial(in_a_child, lambda: respondent.begin(row, SimpleQueue()) is None)
    while_locked = child_asks()
    respondent._lock.release()
    first = respondent.begin(row, SimpleQueue())
    while_open = child_asks()
    again = respondent.begin(row, SimpleQueue())
    let_go.set()

    assert (while_locked, first, while_open, again) == (True, None, True, Unasked.OPEN)


def test_a_child_does_not_take_the_wake_ups_of_its_parent():
    wake = Wake()
    wake.set()

    assert in_a_child(lambda: not wake.wait(0.05))
    assert wake.wait(60)


def test_a_remote_sender_has_another_connection_there():
    """The connection of the parent is neither used nor closed."""
    stub = StubServer()
    sender = stub.open()
    sender.send([Message("orders", b"1")])

    def child() -> bool:
        verdicts = [*sender.send([Message("orders", b"2")])]
        sender.close()
        return (verdicts, [each.is_closed for each in stub.connections]) == ([DONE], [False, True])

    assert in_a_child(child)
    assert sender.send([Message("orders", b"3")]) == [DONE]
    assert [each.is_closed for each in stub.connections] == [False]
    sender.close()
