"""A worker looks seldom while nothing comes, and at once where there are many messages."""

import pytest

from outbox.worker.polling import Polling

SHORTEST, LONGEST = 0.05, 1.0


class Looks:
    """A worker that looks at given moments."""

    def __init__(self):
        self.now = 100.0
        self.polling = Polling(SHORTEST, LONGEST, clock=lambda: self.now)

    def idle(self, looks):
        """The pauses after so many looks that find nothing."""
        found = []
        for _ in range(looks):
            found.append(self.polling.pause())
            self.now += found[-1]
        return found

    def busy(self, between, looks=100, messages=1, hinted=False):
        """Looks that find messages, each after a hint or all without."""
        for _ in range(looks):
            self.now += between
            if hinted:
                self.polling.hinted()
            self.polling.came(messages)


@pytest.fixture
def looks():
    return Looks()


def test_an_idle_worker_pauses_longer_and_longer(looks):
    assert looks.idle(7) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_after_messages_or_a_hint_it_begins_with_the_shortest_pause(looks):
    looks.idle(5)
    looks.polling.came(1)
    after_a_message = looks.idle(3)
    looks.polling.hinted()

    assert after_a_message == looks.idle(3) == [0.05, 0.1, 0.2]


def test_where_messages_come_without_hints_it_looks_eight_times_for_each(looks):
    looks.busy(0.004)

    assert looks.polling.pause() == pytest.approx(0.0005, rel=0.3)


def test_where_each_message_comes_with_a_hint_it_waits_for_the_next(looks):
    looks.busy(0.004, hinted=True)

    assert looks.polling.pause() == SHORTEST


def test_while_a_writer_pauses_its_hints_it_looks_four_times_for_each_message(looks):
    looks.busy(0.004, hinted=True)
    looks.polling.hinted(0.05)
    looks.polling.hinted()
    at_once = looks.polling.pause()
    looks.now += 0.05
    looks.polling.came(12)
    when_the_next_hint_is_late = looks.polling.pause()
    looks.now += 0.06
    looks.polling.came(12)

    assert at_once == pytest.approx(0.0005, rel=0.3)
    assert when_the_next_hint_is_late == pytest.approx(0.0005, rel=0.3)
    assert looks.polling.pause() == SHORTEST


def test_a_pause_of_hints_does_not_matter_where_messages_are_few(looks):
    looks.polling.hinted(0.05)

    assert looks.idle(3) == [0.05, 0.1, 0.2]


def test_messages_that_a_long_pause_has_gathered_are_many_as_well(looks):
    looks.busy(0.05, messages=30)

    assert looks.polling.pause() == pytest.approx(0.05 / 30 / 8, rel=0.3)


@pytest.mark.parametrize("between", [0.002, 0.00001])
def test_when_no_more_come_it_is_idle_soon_and_has_not_looked_all_the_time(looks, between):
    looks.busy(between)
    before = looks.now
    pauses = looks.idle(1_100)

    assert min(pauses) >= 0.0001
    assert pauses[-1] == LONGEST
    assert next(looks for looks, pause in enumerate(pauses) if pause >= SHORTEST) <= 1_020
    assert looks.now > before


def test_now_and_then_a_message_is_not_many(looks):
    looks.busy(0.02)

    assert looks.polling.pause() == SHORTEST


def test_the_pauses_are_never_longer_than_they_were_asked_to_be():
    quick = Polling(0.0001, 0.0001)
    quick.came(1_000)

    assert quick.pause() <= 0.0001
