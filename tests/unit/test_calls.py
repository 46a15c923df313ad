"""Calls: turns are given in order, a call that hangs loses its turn, and the last look is right before the call."""

import math
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox import Message, Verdict
from outbox.model.lease import Lease, Partition
from outbox.model.verdict import DONE
from outbox.runtime.clock import clock
from outbox.runtime.stop import Stop
from outbox.runtime.wakeup import Wake
from outbox.worker.calls import Call, Caller, HeldLease
from outbox.worker.calls import Handler as HandlerFunction
from tests.support.stage import Handler, ids, messages
from tests.support.waiting import eventually


def lease_until(moment: float) -> HeldLease:
    """A lease that ends at a moment."""
    return HeldLease(Lease(Partition("relay"), 1, "us"), moment, Stop())


@pytest.mark.parametrize(("until", "made"), [(-math.inf, False), (math.inf, True)])
def test_a_call_is_made_only_while_its_lease_lasts(until, made):
    """The thread that made it may have been suspended since the worker looked at its lease."""
    handler = Handler()
    call = Call(messages("a"), lease_until(until))

    call.perform(handler)

    assert (call.late, handler.calls) == (not made, [[1]] if made else [])


@pytest.mark.parametrize(("needs", "late"), [(4.0, False), (5.0, True)])
def test_a_lease_that_ends_when_the_call_may_end_is_too_short(monkeypatch, needs, late):
    moment = clock()
    monkeypatch.setattr("outbox.worker.calls.clock", lambda: moment)
    call = Call(messages("a"), lease_until(moment + 5.0), needs=needs)

    call.perform(Handler())

    assert call.late == late


class Held:
    """A handler whose calls come back when they are released, in any order."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._released: dict[int, threading.Event] = {}

    def __call__(self, given: Sequence[Message]) -> Sequence[Verdict]:
        """Wait for the release."""
        (id,) = ids(given)
        released = self._released.setdefault(id, threading.Event())
        self.begun.append(id)
        assert released.wait(60)
        return [DONE]

    def release(self, *calls: int) -> None:
        """Let these come back, now or when they begin."""
        for id in calls:
            self._released.setdefault(id, threading.Event()).set()


def asked(caller: Caller, handler: HandlerFunction, count: int, *, deadline: float = math.inf) -> list[Call]:
    """So many calls, each with a message, in the order of their numbers."""
    calls = [Call([message], deadline=deadline) for message in messages(*[None] * count)]
    for call in calls:
        caller.begin(call, handler)
    return calls


def after(condition: Callable[[], bool]) -> bool:
    """Whether it comes true, and a moment has passed in which more could happen than should."""
    found = eventually(condition)
    time.sleep(0.05)
    return found


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_turns_are_given_in_the_order_of_asking_and_so_many_at_once(concurrency):
    handler = Held()
    calls = asked(Caller(concurrency), handler, 5)
    after(lambda: len(handler.begun) == concurrency)
    at_first, waiting = sorted(handler.begun), [call.started is None for call in calls]
    handler.release(2 if concurrency > 1 else 1)
    after(lambda: len(handler.begun) == concurrency + 1)
    then = sorted(handler.begun)
    handler.release(*range(1, 6))
    all_back = eventually(lambda: all(call.finished for call in calls))

    assert at_first == list(range(1, concurrency + 1))
    assert waiting == [False] * concurrency + [True] * (5 - concurrency)
    assert then == list(range(1, concurrency + 2))
    assert (all_back, [call.verdicts for call in calls]) == (True, [[DONE]] * 5)


def test_whoever_asks_again_comes_after_those_who_wait():
    """Two partitions share a caller: none of them has two turns before the other has one."""
    handler = Held()
    caller = Caller()
    first, second, again = (Call([message]) for message in messages(None, None, None))
    caller.begin(first, handler)
    caller.begin(second, handler)
    handler.release(1)
    assert eventually(lambda: first.finished)
    caller.begin(again, handler)
    handler.release(2, 3)
    assert eventually(lambda: again.finished)

    assert handler.begun == [1, 2, 3]


def test_a_call_past_its_deadline_gives_its_turn_up_and_takes_no_other_when_it_comes_back():
    handler = Held()
    caller = Caller()
    hangs, second, third = asked(caller, handler, 3)
    hangs.deadline = 0.3
    beside = eventually(lambda: caller.look(second) and handler.begun == [1, 2])
    overdue = caller.overdue
    handler.release(1)
    assert after(lambda: hangs.finished)
    begun = list(handler.begun)
    handler.release(2, 3)
    assert eventually(lambda: third.finished)

    assert (beside, overdue, begun) == (True, [hangs], [1, 2])
    assert (caller.overdue, handler.begun) == ([], [1, 2, 3])


def test_a_deadline_begins_with_the_turn():
    handler = Held()
    caller = Caller()
    first, second = asked(caller, handler, 2, deadline=60.0)
    waiting = (second.due, second.seconds, second.over)
    handler.release(1)
    assert eventually(lambda: second.started is not None)
    due, began = second.due, second.started
    handler.release(2)

    assert (waiting, due) == ((math.inf, 0.0, False), (began or 0) + 60.0)
    assert eventually(lambda: first.finished and second.finished)


def test_a_call_that_waits_for_its_turn_can_be_withdrawn_and_one_that_has_begun_cannot():
    handler = Held()
    caller = Caller()
    first, second = asked(caller, handler, 2)
    withdrawn = [caller.withdraw(first), caller.withdraw(second)]
    handler.release(1)
    assert after(lambda: first.finished)

    assert (withdrawn, second.late, second.finished, handler.begun) == ([False, True], True, True, [1])


def test_whoever_waits_is_woken_when_the_call_comes_back_and_when_its_turn_comes():
    handler, wakes = Held(), [Wake(), Wake()]
    caller = Caller()
    calls = [Call([message], wake=wake.set) for message, wake in zip(messages(None, None), wakes, strict=True)]
    for call in calls:
        caller.begin(call, handler)
        caller.look(call)
    handler.release(1)
    woken = [wakes[0].wait(60), wakes[1].wait(60)]
    begun = calls[1].started is not None
    handler.release(2)

    assert (woken, begun, wakes[1].wait(60), calls[1].finished) == ([True, True], True, True, True)


def test_a_call_that_comes_back_before_anybody_waits_for_it_wakes_nobody_and_is_not_waited_for():
    caller, wakes = Caller(), list[str]()
    call = Call(messages(None), wake=lambda: wakes.append("woken"))
    caller.begin(call, lambda given: [DONE] * len(given))
    assert eventually(lambda: call.finished)
    waits = caller.look(call) - time.monotonic()

    assert (waits <= 0, wakes) == (True, [])


def test_a_call_beside_others_of_the_destination_begins_when_their_turn_is_over():
    """So the time for which it waits is no part of its deadline, and its lease is looked at afterwards."""
    handler, others, wake = Handler(), Held(), Wake()
    caller, held = Caller(), lease_until(math.inf)
    (theirs,) = asked(caller, others, 1)
    call = Call(messages("a"), held, wake=wake.set)
    caller.begin(call, handler)
    time.sleep(0.1)
    before, held.lost = call.started, True
    others.release(1)

    assert (before, wake.wait(60), eventually(lambda: call.finished)) == (None, True, True)
    assert (theirs.verdicts, call.late, handler.calls) == ([DONE], True, [])


def test_a_call_whose_turn_comes_after_its_moment_is_not_made():
    """The time of a message may end while the call waits for its turn."""
    handler, others = Handler(), Held()
    caller = Caller()
    (theirs,) = asked(caller, others, 1)
    late, in_time = Call(messages("a"), until=clock() + 0.05), Call(messages("b"), until=clock() + 60)
    for call in (late, in_time):
        caller.begin(call, handler)
    time.sleep(0.1)
    others.release(1)

    assert eventually(lambda: theirs.finished and in_time.finished)
    assert (late.late, in_time.late, handler.calls) == (True, False, [[1]])


def test_threads_without_a_call_end_when_the_caller_is_closed_and_others_are_made():
    handler = Handler()
    caller = Caller()
    threads = set(threading.enumerate())
    for _ in range(2):
        (call,) = asked(caller, handler, 1)
        assert eventually(lambda: call.finished)  # noqa: B023 - asked at once
        mine = set(threading.enumerate()) - threads
        caller.close()
        assert eventually(lambda: not any(thread.is_alive() for thread in mine))  # noqa: B023

    assert handler.calls == [[1], [1]]


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=30))
def test_never_more_calls_than_allowed_and_each_that_is_not_withdrawn_is_made_once_in_order(concurrency, steps):
    """True: another call is asked for; False: the one that was asked for last is withdrawn, if it waits still."""
    lock, begun, at_once, most = threading.Lock(), list[int](), 0, 0

    def handler(given: Sequence[Message]) -> Sequence[Verdict]:
        nonlocal at_once, most
        with lock:
            begun.append(given[0].id or 0)
            at_once += 1
            most = max(most, at_once)
        with lock:
            at_once -= 1
        return [DONE]

    caller, calls, withdrawn = Caller(concurrency), list[Call](), set[int]()
    for asks in steps:
        if asks:
            calls.append(Call(messages(None, first=len(calls) + 1)))
            caller.begin(calls[-1], handler)
        elif calls and caller.withdraw(calls[-1]):
            withdrawn.add(len(calls))
    assert eventually(lambda: all(call.finished for call in calls))
    caller.close()

    assert most <= concurrency
    expected = [id for id in range(1, len(calls) + 1) if id not in withdrawn]
    assert (begun if concurrency == 1 else sorted(begun)) == expected


def without_a_thread(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """The next so many threads of callers cannot start; returns a list of those that could not."""
    start, failed = threading.Thread.start, list[str]()

    def starting(thread: threading.Thread) -> None:
        if thread.name == "outbox-handler" and len(failed) < number:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    return failed


def test_a_call_without_a_thread_is_not_made_later_because_whoever_asked_knows(monkeypatch):
    handler = Handler()
    caller = Caller()
    without_a_thread(monkeypatch, 1)
    first, second = (Call([message]) for message in messages(None, None))

    with pytest.raises(RuntimeError, match="can't start new thread"):
        caller.begin(first, handler)
    caller.begin(second, handler)

    assert eventually(lambda: second.finished)
    assert (handler.calls, first.finished, caller.overdue) == ([[2]], False, [])


def test_a_call_of_others_waits_for_a_thread(monkeypatch):
    """A look gives the turn of a call that hangs to the next one, which is of another partition."""
    handler = Held()
    caller = Caller()
    hangs, waits = asked(caller, handler, 2, deadline=0.05)
    failed = without_a_thread(monkeypatch, 1)
    assert eventually(lambda: hangs.over and bool(caller.look(hangs)) and bool(failed))
    waiting = waits.started is None
    waits.deadline = 60.0
    caller.look(waits)
    handler.release(1, 2)

    assert (waiting, eventually(lambda: waits.finished), waits.verdicts) == (True, True, [DONE])
