"""Waits: over at their moment, by their call or by their stop; whoever drives a generator sleeps until then."""

import threading
import time
from collections.abc import Generator

import pytest

from outbox.runtime.stop import Stop
from outbox.runtime.wakeup import Wake
from outbox.worker.calls import Call, Caller
from outbox.worker.waiting import Wait
from tests.support.stage import Handler, drive, messages
from tests.support.waiting import eventually

LATER = time.monotonic() + 1e6


def test_a_wait_is_over_at_its_moment_by_its_call_or_by_its_stop():
    call, stop, now = Call(messages("a")), Stop(), time.monotonic()
    waits = [Wait(now), Wait(LATER), Wait(LATER, (call,)), Wait(LATER, stop=stop)]
    before = [wait.over for wait in waits]
    call.finish()
    stop.ask()

    assert (before, [wait.over for wait in waits]) == ([True, False, False, False], [True, False, True, True])


def test_a_shorter_wait_ends_earlier_and_by_the_same():
    stop = Stop()
    wait = Wait(LATER, stop=stop)
    short = wait.at_most(0.0)

    assert (wait.over, short.over, short.stop, wait.at_most(1e9)) == (False, True, stop, wait)


def test_a_generator_is_driven_to_its_end_and_its_calls_wake_the_one_who_drives():
    handler, wake = Handler(), Wake()
    caller = Caller()

    def steps() -> Generator[Wait, None, str]:
        for number in range(3):
            call = Call(messages("a", first=number), wake=wake.set)
            caller.begin(call, handler)
            while not call.finished:
                caller.look(call)
                yield Wait(LATER, (call,))
        return "done"

    assert (drive(steps(), wake), handler.calls) == ("done", [[0], [1], [2]])


def test_a_stop_ends_a_pause():
    wake = Wake()
    stop = Stop(wake=wake.set)

    def steps() -> Generator[Wait, None, bool]:
        yield Wait(LATER, stop=stop)
        return stop.asked

    threading.Timer(0.1, stop.ask).start()

    assert drive(steps(), wake)


def test_a_generator_whose_driver_is_interrupted_is_closed():
    """So that it holds what a call under way has, before anything else begins."""
    closed = []

    class Interrupted(Wake):
        def wait(self, seconds: float, also: int | None = None) -> bool:
            raise KeyboardInterrupt

    def steps() -> Generator[Wait, None, None]:
        try:
            yield Wait(LATER)
        finally:
            closed.append(True)

    generator = steps()
    with pytest.raises(KeyboardInterrupt):
        drive(generator, Interrupted())

    assert eventually(lambda: closed == [True])
