"""Calls: the last look at the lease is on the thread that makes them."""

import math

import pytest

from outbox.runtime.clock import clock
from outbox.worker.calls import Call
from tests.support.stage import Handler, messages


@pytest.mark.parametrize(("begin_before", "made"), [(-math.inf, False), (math.inf, True)])
def test_a_call_is_made_only_before_its_moment(begin_before, made):
    """The thread that made it may have been suspended since the worker looked at its lease."""
    handler = Handler()
    call = Call(messages("a"), begin_before)

    call.perform(handler)

    assert (call.finished, call.late, handler.calls) == (True, not made, [[1]] if made else [])


def test_the_moment_itself_is_too_late(monkeypatch):
    moment = clock()
    monkeypatch.setattr("outbox.worker.calls.clock", lambda: moment)
    call = Call(messages("a"), moment)

    call.perform(Handler())

    assert call.late
