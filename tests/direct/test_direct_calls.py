"""A call of a direct sender holds few messages, so that their acks are in time, and as many as a pause brings."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import pytest

from outbox import Message
from outbox.direct.sends import Dispatcher
from outbox.runtime.clock import clock
from outbox.runtime.linger import Linger
from outbox.worker.calls import Call
from tests.support.destination import Destination
from tests.support.directly import before_each_call, writing_directly
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


def test_calls_grow_only_as_the_destination_allows(engine):
    """However many were committed together: an ack follows each call, long before the compensation begins.

    The first one asks with a single message: nobody knows yet how long one takes.
    """
    calls: list[int] = []

    class Slow(Destination):
        def send(self, messages):
            calls.append(len(messages))
            time.sleep(0.02 * len(messages))
            return super().send(messages)

    destination = Slow()
    with writing_directly(engine, destination) as outbox:
        with outbox.begin() as session:
            outbox.send_all(session, [Message("orders", b"%d" % number) for number in range(150)])
        assert eventually(lambda: len(destination.bodies) == 150)

    assert calls[0] == 1
    assert max(calls) <= 0.5 / 0.02
    assert sum(calls) == 150


def test_a_call_is_short_also_at_a_destination_that_has_been_quick(engine, destination):
    """It may become slower at any moment."""
    calls: list[int] = []
    before_each_call(destination, lambda messages: calls.append(len(messages)))
    with writing_directly(engine, destination) as outbox:
        with outbox.begin() as session:
            outbox.send_all(session, [Message("orders", b"%d" % number) for number in range(1500)])
        assert eventually(lambda: len(destination.bodies) == 1500)

    assert max(calls) == 128


class Busy:
    """A delivery during whose every call one more message is committed, until there were `rounds` of them."""

    usable, hangs, away, right, refresh_in = True, False, False, 60.0, 60.0

    def __init__(self, rounds: int) -> None:
        self.left = rounds
        self.commit = lambda: None

    def acknowledge_late(self) -> None:
        """None is late."""

    def deliver(self, claims, wake):
        """One call."""
        claims.clear()
        self.left -= 1
        if self.left:
            self.commit()
        yield Call([])

    def look(self, call: Call) -> float:
        """It has come back."""
        return time.monotonic()

    def close(self) -> None:
        """Nothing is open."""


def test_what_is_committed_while_a_call_is_under_way_waits_for_the_pause_after_it(monkeypatch):
    """Else a busy writer sends its messages one by one, because each call meets some more."""
    pauses: list[int] = []

    def pause(_linger: Linger, commits: int) -> float:
        pauses.append(commits)
        return 0.0

    monkeypatch.setattr(Linger, "after", pause)
    delivery: Any = Busy(rounds=5)
    dispatcher = Dispatcher(delivery)
    delivery.commit = lambda: dispatcher.committed([(1, UUID(int=1))], since=clock())
    delivery.commit()
    dispatcher.start()
    dispatcher.end()
    dispatcher.join(60)

    assert (delivery.left, pauses) == (0, [1] * 5)
