"""A trouble that lasts is logged ever less often; a new one at once."""

import logging

import pytest

from outbox.runtime.throttled_log import ThrottledLog


@pytest.fixture
def lines(caplog):
    """The moments, of whole seconds, at which a line comes out."""

    def logged(troubles):
        now, found = [0.0], []
        log = ThrottledLog(logging.getLogger("outbox"), first=5, longest=60, clock=lambda: now[-1])
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
