"""The turn of a partition: what it does until it waits, when it has something to do again, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator

import pytest

from outbox.errors import HungHandlerError, LeaseLostError
from outbox.model.lease import Lease, Partition
from outbox.model.message import Message
from outbox.runtime.stop import Stop
from outbox.store.dialects.dialect import Hint
from outbox.worker.calls import Call, HeldLease
from outbox.worker.hung import HungCalls
from outbox.worker.polling import Polling
from outbox.worker.settings import Until
from outbox.worker.turn import Turn
from outbox.worker.waiting import Wait

FAR = 1e9


class Script:
    """The work for a partition: each step yields its waits, and then returns how much it found."""

    arrived = False
    due_in = FAR

    def __init__(self, *steps: tuple[list[Wait], int]) -> None:
        self.steps: Iterator[tuple[list[Wait], int]] = iter(steps)
        self.done: list[str] = []
        self.graces = 0
        self.alone = False

    def step(self, *, postpone: bool) -> Generator[Wait, None, int]:
        """Do as the script says."""
        self.done.append("step")
        waits, found = next(self.steps)
        yield from waits
        return found

    def awaits_grace(self) -> bool:
        """Whether the script has one more."""
        self.graces -= 1
        return self.graces >= 0

    def decide(self) -> None:
        """Note it."""
        self.done.append("decide")

    def settle_all(self) -> None:
        """Note it."""
        self.done.append("settle")

    def tidy(self) -> None:
        """Note it."""
        self.done.append("tidy")

    def close(self) -> None:
        """Note it."""
        self.done.append("close")


def turn_of(work: Script, until: Until = "stopped", *, hears: bool = True, hung: HungCalls | None = None) -> Turn:
    """A turn under a lease that nobody wants."""
    held = HeldLease(Lease(Partition("relay"), 1, "us"), FAR, Stop())
    return Turn(held, work, hung or HungCalls(), Polling(60.0, 60.0), until=until, hears=hears)


def steps(turn: Turn, most: int = 20) -> int:
    """Step until it waits for something or ends; return how often that was."""
    for number in range(most):
        if not (turn.due and turn.step()):
            return number
    raise AssertionError("it waits for nothing")


def call(*, finished: bool = False) -> Call:
    """A call of the handler."""
    made = Call([Message("orders", b"1")])
    made.finished = finished
    return made


def test_it_looks_again_at_once_after_a_find_and_waits_after_none():
    work = Script(([], 1), ([], 1), ([], 0))
    turn = turn_of(work)

    assert (steps(turn), work.done, turn.idle, turn.due) == (3, ["step"] * 3, True, False)


def test_a_hint_ends_the_wait_of_one_that_is_idle():
    turn = turn_of(Script(([], 0), ([], 0)))
    steps(turn)
    turn.hinted(Hint())

    assert (turn.due, turn.idle) == (True, False)


@pytest.mark.parametrize("hears", [True, False])
def test_it_is_idle_only_if_it_hears_hints(hears):
    turn = turn_of(Script(([], 0)), hears=hears)
    steps(turn)

    assert turn.idle == hears


def test_a_call_under_way_is_waited_for_also_under_a_lease_that_was_lost():
    """Its step goes on when the call has come back; then the turn ends."""
    made = call()
    turn = turn_of(Script(([Wait(FAR, (made,))], 1)))
    steps(turn)
    turn.held.lost = True
    before = turn.due
    made.finished = True

    assert (before, turn.due, turn.idle) == (False, True, False)
    with pytest.raises(LeaseLostError, match="relay: another worker has the lease now"):
        steps(turn)


def test_a_pause_for_the_destination_is_told_from_a_call():
    turn = turn_of(Script(([Wait(FAR, (call(finished=True),)), Wait(0.0), Wait(FAR, (call(),))], 0)))
    seen = []
    for _ in range(3):
        turn.step()
        seen.append(turn.pauses)

    assert seen == [False, True, True]


def test_a_stop_ends_it_when_everything_is_settled():
    work = Script(([], 0))
    turn = turn_of(work)
    steps(turn)
    turn.held.stop.ask()

    assert (turn.due, turn.step(), turn.finished, work.done) == (True, False, False, ["step", "settle"])


def test_while_a_call_hangs_the_lease_is_not_given_back():
    hung = HungCalls()
    hung.add(call())
    turn = turn_of(Script(([], 0), ([], 0)), hung=hung)
    steps(turn)
    turn.held.stop.ask()

    assert (turn.step(), turn.held.stop.asked) == (True, False)


@pytest.mark.parametrize(("until", "done"), [("empty", 3), ("once", 1)])
def test_it_is_finished_when_nothing_is_left_or_after_one_batch(until, done):
    work = Script(([], 5), ([], 2), ([], 0))
    turn = turn_of(work, until)
    steps(turn)

    assert (turn.finished, work.done) == (True, [*["step"] * done, "settle", "tidy"])


def test_it_is_not_finished_while_messages_wait_for_their_grace():
    work = Script(([], 0), ([], 0))
    work.graces, work.due_in = 1, 60.0
    turn = turn_of(work, "empty")
    steps(turn)

    assert (turn.finished, turn.due, turn.wait.until > time.monotonic()) == (False, False, True)


def test_it_is_not_finished_while_a_call_hangs():
    hung, hangs = HungCalls(), call()
    hangs.started, hangs.deadline = time.monotonic() - 100, 1.0
    hung.add(hangs)

    with pytest.raises(HungHandlerError, match="never came back"):
        steps(turn_of(Script(([], 0)), "empty", hung=hung))


def test_whatever_it_does_it_can_be_closed():
    work = Script(([Wait(FAR, (call(),))], 1))
    turn = turn_of(work)
    steps(turn)
    turn.close()

    assert work.done == ["step", "close"]
