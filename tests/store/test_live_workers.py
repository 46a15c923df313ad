"""Live workers: who was seen a moment ago shares the partitions of a subscription."""

from datetime import timedelta

import pytest

from outbox.store.subscriptions.workers import LiveWorkers
from tests.support import probe
from tests.support.leases import step_clock

WITHIN = timedelta(seconds=10)


@pytest.fixture
def workers(channel):
    """Those of `relay`; one of another subscription is there as well."""
    LiveWorkers(channel, "another").seen("stranger")
    return LiveWorkers(channel, "relay")


def test_those_are_live_that_were_seen(workers):
    for worker in ("ann", "bob", "ann"):
        workers.seen(worker)

    assert workers.live(WITHIN) == {"ann", "bob"}


def test_one_that_stopped_is_not_live(workers):
    for worker in ("ann", "bob"):
        workers.seen(worker)

    workers.gone("ann")

    assert workers.live(WITHIN) == {"bob"}


@pytest.mark.parametrize("step", [timedelta(minutes=5), -timedelta(minutes=5)], ids=["long ago", "the clock went back"])
def test_one_that_was_seen_at_another_time_is_not_live(engine, workers, step):
    """A worker that lives writes again; the row of a dead one may lie in the future after a step of the clock."""
    workers.seen("dead")
    step_clock(engine, step, "outbox_worker.seen_at")
    workers.seen("ann")

    assert workers.live(WITHIN) == {"ann"}


def test_old_rows_are_pruned(engine, channel, workers):
    workers.seen("dead")
    step_clock(engine, timedelta(hours=2), "outbox_worker.seen_at")
    workers.seen("ann")

    workers.prune()

    assert (workers.live(timedelta(days=1)), probe.count(channel, "worker")) == ({"ann"}, 2)
