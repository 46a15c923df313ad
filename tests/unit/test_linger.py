"""Who follows commits is at hand for a single one, and spares the machine where there are many."""

import random

from outbox.runtime.linger import Linger

SHORT, LONG = 0.01, 0.05


class Commits:
    """A pace beside commits at given moments; time goes by only in its pauses."""

    def __init__(self, moments):
        self.moments = list(moments)
        self.now = 0.0
        self.pace = Linger(LONG, SHORT, clock=lambda: self.now)

    def pauses(self):
        """The pause after each look that found commits; before one it waits for the next commit."""
        found = []
        while self.moments:
            self.now = max(self.now, self.moments[0])
            count = sum(moment <= self.now for moment in self.moments)
            del self.moments[:count]
            found.append(self.pace.after(count))
            self.now += found[-1]
        return found


def every(gap, number=200, start=0.0):
    return [start + n * gap for n in range(number)]


def at_random(a_second, number=2_000):
    moments, now, dice = [], 0.0, random.Random(7)
    for _ in range(number):
        now += dice.expovariate(a_second)
        moments.append(now)
    return moments


def test_commits_now_and_then_are_not_waited_for():
    assert set(Commits(every(0.02)).pauses()) == {SHORT}


def test_a_few_at_once_are_not_many():
    assert set(Commits([0.0, 0.0, 0.001, 0.002, 0.003, 1.0]).pauses()) == {SHORT}


def test_commits_at_random_are_not_taken_for_many():
    """As many a second at even distances are not, either."""
    pauses = Commits(at_random(200)).pauses()

    assert pauses.count(LONG) / len(pauses) < 0.02


def test_where_there_are_many_the_pauses_are_long():
    pauses = Commits(every(0.001, 2_000)).pauses()

    assert set(pauses[-20:]) == {LONG}


def test_one_commit_in_three_milliseconds_is_many_too():
    """Each of several writers on one machine commits so often; hints at every commit would slow all of them down."""
    pauses = Commits(every(0.0032, 300)).pauses()

    assert pauses.count(LONG) > len(pauses) / 2


def test_they_are_short_again_soon_after():
    many = every(0.0005, 4_000)

    pauses = Commits([*many, *every(0.1, 5, start=many[-1] + 0.2)]).pauses()

    assert pauses[-5:] == [SHORT] * 5
