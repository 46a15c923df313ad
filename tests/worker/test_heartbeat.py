"""A kept lease: how long it is good for is known by an own clock, on the safe side."""

from datetime import timedelta

import pytest

from outbox import Outbox
from outbox.errors import LeaseLostError
from outbox.model.lease import Lease, Partition
from outbox.store.subscriptions.leases import Leases
from outbox.worker.heartbeat import LeaseHeartbeat
from tests.support.waiting import eventually


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("outbox.worker.heartbeat.clock", clock)
    return clock


def test_the_deadline_counts_from_before_the_renewal_was_sent(sqlite_engine, clock, monkeypatch):
    """Nobody knows when the database renewed it: at once, perhaps, and only the answer took so long."""

    def renew(*_arguments):
        clock.now += 4.0
        return True

    monkeypatch.setattr(Leases, "renew", renew)
    keeper = LeaseHeartbeat(
        Outbox(sqlite_engine).database,
        Lease(Partition("relay"), 1, "us"),
        length=timedelta(seconds=10),
        every=timedelta(milliseconds=10),
        taken=clock(),
        lost=lambda: None,
    )
    renewed = eventually(lambda: clock.now > 0)
    keeper.stop()

    assert (renewed, keeper.until - clock()) == (True, 6.0)


@pytest.mark.parametrize(("needed", "left"), [(9.0, 10.0), (10.0, 10.0), (11.0, 10.0), (0.0, 0.0)])
def test_no_call_may_begin_when_too_little_of_the_lease_is_left(sqlite_engine, clock, monkeypatch, needed, left):
    """A renewal may come until the lease has run out; then it is lost."""
    monkeypatch.setattr(Leases, "renew", failing)
    keeper = LeaseHeartbeat(
        Outbox(sqlite_engine).database,
        Lease(Partition("relay"), 1, "us"),
        length=timedelta(seconds=20),
        every=timedelta(milliseconds=10),
        taken=clock(),
        lost=lambda: None,
    )
    clock.now = 20.0 - left
    try:
        if left:
            assert (keeper.require(needed), keeper.until) == (needed < left, 20.0)
        else:
            with pytest.raises(LeaseLostError, match="could not be renewed in time"):
                keeper.require(needed)
    finally:
        keeper.stop()


def failing(*_arguments: object) -> bool:
    """The database is away."""
    raise OSError
