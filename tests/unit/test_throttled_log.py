"""A trouble that lasts is logged ever less often; a new one at once."""

import logging

import pytest

from outbox.runtime.throttled_log import Throttle, ThrottledLog


@pytest.fixture
def lines(caplog):
    """The moments, of whole seconds, at which a line comes out."""

    def logged(troubles):
        now, found = [0.0], []
        log = ThrottledLog(logging.getLogger("outbox"), clock=lambda: now[-1])
        for each in troubles:
            now.append(each)
            if log.warning("away since %d", each):
                found.append(each)
        assert [record.getMessage() for record in caplog.records] == [f"away since {each}" for each in found]
        return found

    return logged


def test_the_pauses_double_up_to_the_longest(lines):
    assert lines(range(300)) == [0, 5, 15, 35, 75, 135, 195, 255]


def test_after_a_long_silence_it_begins_with_the_shortest_pause(lines):
    assert lines([*range(200), *range(400, 420)]) == [0, 5, 15, 35, 75, 135, 195, 400, 405, 415]


def test_a_single_trouble_now_and_then_is_logged_each_time(lines):
    assert lines(range(0, 1000, 200)) == [0, 200, 400, 600, 800]


def test_each_thing_may_be_logged_at_once_and_then_once_in_a_while():
    moments = [0.0]
    throttle = Throttle(60.0, clock=lambda: moments[-1])
    said = []
    for second in range(150):
        moments.append(second)
        said += [(second, each) for each in ("one", "other")[: 1 + (second >= 10)] if throttle.allows(each)]

    assert said == [(0, "one"), (10, "other"), (60, "one"), (70, "other"), (120, "one"), (130, "other")]


def test_after_very_many_things_each_may_be_logged_again():
    throttle = Throttle(60.0, clock=lambda: 1.0)

    assert all(map(throttle.allows, range(10_001)))
    assert [throttle.allows(0), throttle.allows(10_000)] == [True, False]
