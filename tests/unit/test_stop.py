"""A stop ends every pause at once, and is forgotten when it was followed."""

import signal
import threading

import pytest

from outbox.runtime.stop import Stop
from outbox.runtime.wakeup import Wake


@pytest.fixture
def stop():
    return Stop()


def test_nothing_is_asked_at_first(stop):
    assert (stop.asked, stop.rest(0)) == (False, True)


def test_a_pause_ends_at_once_when_a_stop_is_asked(stop):
    ended = list[bool]()
    resting = threading.Thread(target=lambda: ended.append(stop.rest(120)), daemon=True)
    resting.start()
    stop.ask()
    resting.join(60)

    assert ended == [False]


@pytest.mark.timeout(60)
def test_a_signal_handler_may_ask(stop):
    signal.signal(signal.SIGALRM, lambda *_: stop.ask())
    signal.setitimer(signal.ITIMER_REAL, 0.05)

    assert not stop.rest(120)


@pytest.mark.timeout(60)
def test_there_is_no_pause_after_it_was_asked(stop):
    stop.ask()

    assert [stop.rest(120), stop.rest(120)] == [False, False]


def test_a_stop_that_was_followed_is_forgotten(stop):
    stop.ask()
    stop.withdraw()

    assert (stop.asked, stop.rest(0.01)) == (False, True)


def test_a_stop_within_another_is_asked_when_that_one_is(stop):
    inner = Stop(stop)
    ended = list[bool]()
    resting = threading.Thread(target=lambda: ended.append(inner.rest(120)), daemon=True)
    resting.start()
    stop.ask()
    resting.join(60)

    assert (ended, inner.asked) == ([False], True)
    stop.withdraw()
    assert not inner.asked


def test_a_stop_within_another_can_be_asked_alone(stop):
    inner, beside = Stop(stop), Stop(stop)
    inner.ask()
    stop.withdraw()

    assert (inner.asked, stop.asked, beside.asked) == (True, False, False)
    inner.withdraw()
    assert not inner.asked


def test_a_wake_up_that_somebody_waits_on_is_set_as_well(stop):
    wake = Wake()
    inner = Stop(Stop(stop), wake=wake.set)
    stop.ask()

    assert (wake.wait(120), inner.asked) == (True, True)


def test_a_stop_may_be_within_another_for_a_while(stop):
    inner = Stop()
    with inner.within(stop):
        stop.ask()
        during = inner.asked
    after = inner.asked
    stop.withdraw()
    for _ in range(3):
        with inner.within(stop):
            pass

    assert (during, after) == (True, False)
    assert len(stop._inner) == 1, "it is held once, however often it was there"
