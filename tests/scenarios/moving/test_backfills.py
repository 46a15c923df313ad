"""A backfill of all there is, while writers write, and relays share the partitions and are killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox.admin.backfill import backfill
from outbox.store.database import Channel
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.scenarios.moving.test_repartition import NUMBERS, Load
from tests.scenarios.moving.writers import many
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


class Beside(Load):
    """The second change is a backfill, and the third waits for its end.

    `before`: what had been committed when it was ordered; `after`: what had been when it was there.
    """

    before: frozenset[tuple[str, int]] = frozenset()
    after: frozenset[tuple[str, int]] = frozenset()

    def _change(self, channel: Channel, number: int) -> None:
        if number == NUMBERS[0]:
            super()._change(channel, number)
        elif number == NUMBERS[1]:
            self.before = self._committed(channel)
            backfill(channel, "relay", ["orders"])
            self.after = self._committed(channel)
        else:
            assert eventually(lambda: len(Subscriptions(channel).all()) == 1, self.seconds)

    @staticmethod
    def _committed(channel: Channel) -> frozenset[tuple[str, int]]:
        return frozenset((key, int(body)) for key, body in channel.rows("SELECT key, body FROM {message}"))


@pytest.fixture
def load(engine: Engine, tmp_path: Path, full: bool) -> Beside:
    """One on a database of its own."""
    return Beside(engine, tmp_path, least=many(engine, full=full), seconds=900 if full else 300)


def test_what_was_there_comes_twice_and_the_rest_once(load):
    written, found, _ = load.perform(relays=3, pause=None)

    came = Counter((each.key, each.number) for each in found)
    once, twice = ({each for each, times in came.items() if times == number} for number in (1, 2))
    assert once | twice == set(written)
    assert load.before <= twice <= load.after


def test_relays_that_are_killed_leave_nothing_of_it_out(load):
    written, found, kills = load.perform(relays=4, pause=2.0)

    came = Counter((each.key, each.number) for each in found)
    assert (set(came), kills > 0) == (set(written), True)
    assert {each for each in load.before if came[each] < 2} == set()
