"""FairLock are first come, first served, and one that hangs does not stop the others."""

import threading
import time

from outbox.runtime.fair_lock import FairLock
from tests.support.waiting import eventually


def in_turn(turns: FairLock, done: list[str], name: str, until: threading.Event | None = None) -> threading.Thread:
    def run() -> None:
        with turns.hold():
            if until is not None:
                until.wait(60)
            done.append(name)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_turns_are_taken_in_the_order_of_asking():
    turns, done, over = FairLock(), list[str](), threading.Event()
    threads = [in_turn(turns, done, "first", over)]
    for name in ("second", "third", "fourth"):
        time.sleep(0.05)
        threads.append(in_turn(turns, done, name))

    over.set()
    for thread in threads:
        thread.join(20)

    assert done == ["first", "second", "third", "fourth"]


def test_whoever_hangs_loses_the_turn_and_takes_nobody_elses_when_coming_back():
    turns, done, over, hold = FairLock(longest=2.0), list[str](), threading.Event(), threading.Event()
    hung = in_turn(turns, done, "hung", over)
    time.sleep(0.05)
    second = in_turn(turns, done, "second", hold)
    time.sleep(2.2)
    over.set()
    hung.join(20)
    third = in_turn(turns, done, "third")
    time.sleep(0.05)
    assert done == ["hung"]

    hold.set()
    second.join(20)
    third.join(20)

    assert eventually(lambda: done == ["hung", "second", "third"])


def test_without_a_limit_a_turn_is_kept_until_its_end():
    turns, done, over = FairLock(), list[str](), threading.Event()
    first = in_turn(turns, done, "first", over)
    time.sleep(0.05)
    second = in_turn(turns, done, "second")
    time.sleep(0.3)
    assert done == []

    over.set()
    first.join(20)
    second.join(20)

    assert done == ["first", "second"]
