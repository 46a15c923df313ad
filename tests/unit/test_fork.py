"""What is to begin anew in a child does so there, and nowhere else."""

import gc
import os
import weakref
from collections.abc import Callable

import pytest

from outbox.runtime import fork


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
        # Not even an error may leave it: the tests would go on in two processes.
        try:
            os._exit(0 if question() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def calls(monkeypatch):
    """The registry of this test."""
    monkeypatch.setattr(fork, "_calls", set())
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
    assert calls == set()


@pytest.mark.usefixtures("calls")
def test_what_fails_does_not_stop_the_others():
    def fails() -> None:
        raise ValueError

    things = [Thing() for _ in range(5)]
    fork.in_child(fails)
    things += [Thing() for _ in range(5)]

    assert in_a_child(lambda: all(thing.owner == "child" for thing in things))
