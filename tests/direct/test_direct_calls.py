"""A call of a direct sender holds so few messages that they are acknowledged before the compensation begins."""

from __future__ import annotations

import time

from outbox import Message
from tests.support.destination import Destination
from tests.support.directly import before_each_call, writing_directly
from tests.support.waiting import eventually


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
        assert eventually(lambda: len(destination.bodies) == 150, 30)

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
        assert eventually(lambda: len(destination.bodies) == 1500, 30)

    assert max(calls) == 128
