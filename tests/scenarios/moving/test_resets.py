"""A subscription begins again while writers write, and relays are killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox.admin.commands import reset
from outbox.errors import SubscriptionError
from outbox.model.position import Position, Progress
from outbox.model.subscription import Subscription
from outbox.runtime import failpoints
from outbox.runtime.failpoints import crash_point
from outbox.store.database import Channel
from outbox.store.log.log import Log
from outbox.store.subscriptions.generations import Generations
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.scenarios.moving.test_repartition import NUMBERS, Load, faults_of_kills
from tests.scenarios.moving.writers import many
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


class Again(Load):
    """The last two changes are resets. `again_at`: when the last one had all leases."""

    again_at = 0

    def _change(self, channel: Channel, number: int) -> None:
        """As an operator does who tries again."""
        if number == NUMBERS[0]:
            super()._change(channel, number)
            return

        def noted(name: str) -> None:
            if name == "command.before_alter":
                self.again_at = time.monotonic_ns()

        def done() -> bool:
            try:
                reset(channel, "relay", "earliest", wait=timedelta(seconds=20))
            except SubscriptionError:
                return False
            return True

        failpoints.arm(noted)
        try:
            assert eventually(done, self.seconds)
        finally:
            failpoints.arm(None)


@pytest.fixture
def load(engine: Engine, tmp_path: Path, full: bool) -> Again:
    """One on a database of its own."""
    return Again(engine, tmp_path, least=many(engine, full=full), seconds=900 if full else 300)


@pytest.mark.parametrize(("relays", "pause"), [(3, None), (4, 2.0)], ids=["at work", "killed"])
def test_everything_comes_again_in_order(load, relays, pause):
    """Once, where nobody is killed; else a batch of each partition may be repeated."""
    written, found, kills = load.perform(relays=relays, pause=pause)

    again = [each for each in found if each.at >= load.again_at]
    assert faults_of_kills(written, again, kills) == {}
    assert len(again) < len(found)


class InPlace(Generations):
    """A broken twin: the partitions stay those that they were, and only their progress goes back."""

    def restart(self, subscription: Subscription, start: Progress) -> None:
        """Overwrite what was settled."""
        values = {"base": str(start.base), "name": subscription.name}
        self._channel.run(
            "UPDATE {progress} SET base = :base, target = NULL, after_id = NULL WHERE subscription = :name", **values
        )


@contextmanager
def beside_workers(channel: Channel, *_: object, **__: object) -> Iterator[Position]:
    """A broken twin: a change that takes no lease."""
    crash_point("command.before_alter")
    now = Log().now(channel).position
    with Subscriptions(channel).changing():
        yield now


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_a_reset_beside_a_worker_at_work_is_found_out(load, monkeypatch):
    """The worker settles what it had in its hands over the new position."""
    monkeypatch.setattr("outbox.store.subscriptions.subscriptions.Generations", InPlace)
    monkeypatch.setattr("outbox.admin.commands.changing", beside_workers)
    load.least, load.seconds = 200, 10

    written, found, _ = load.perform(relays=2, pause=None)

    again = [each for each in found if each.at >= load.again_at]
    assert "lost" in faults_of_kills(written, again, 0)
