"""A kept lease: how long it is good for is known by an own clock, on the safe side."""

from collections.abc import Collection
from datetime import timedelta

import pytest

from outbox import Outbox
from outbox.errors import LeaseLostError
from outbox.model.lease import Lease, Partition
from outbox.model.subscription import Declaration
from outbox.runtime.stop import Stop
from outbox.runtime.wakeup import Wake
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.calls import HeldLease
from outbox.worker.connection import Heartbeat
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
    for module in ("connection", "calls"):
        monkeypatch.setattr(f"outbox.worker.{module}.clock", clock)
    return clock


LEASE = Lease(Partition("relay"), 1, "us")


def heartbeat(outbox: Outbox, length: float) -> Heartbeat:
    """Renews 100 times a second leases of so many seconds."""
    every = timedelta(milliseconds=10)
    return Heartbeat(outbox.database, length=timedelta(seconds=length), every=every, wake=Wake())


def test_the_deadline_counts_from_before_the_renewal_was_sent(sqlite_engine, clock, monkeypatch):
    """Nobody knows when the database renewed it: at once, perhaps, and only the answer took so long."""

    def renew(_leases: Leases, renewed: Collection[Lease], _length: timedelta) -> set[Lease]:
        clock.now += 4.0
        return set(renewed)

    monkeypatch.setattr(Leases, "renew_all", renew)
    beats = heartbeat(Outbox(sqlite_engine), 10)
    held = beats.hold(LEASE, clock(), Stop())
    renewed = eventually(lambda: clock.now > 0)
    beats.close()

    assert (renewed, held.until - clock.now) == (True, 6.0)


@pytest.mark.parametrize(("needed", "left"), [(9.0, 10.0), (10.0, 10.0), (11.0, 10.0), (0.0, 0.0)])
def test_no_call_may_begin_when_too_little_of_the_lease_is_left(sqlite_engine, clock, monkeypatch, needed, left):
    """A renewal may come until the lease has run out; then it is lost."""
    monkeypatch.setattr(Leases, "renew_all", failing)
    beats = heartbeat(Outbox(sqlite_engine), 20)
    held = beats.hold(LEASE, clock(), Stop())
    clock.now = 20.0 - left
    try:
        if left:
            assert (held.require(needed), held.until) == (needed < left, 20.0)
        else:
            with pytest.raises(LeaseLostError, match="could not be renewed in time"):
                held.require(needed)
    finally:
        beats.close()


def failing(*_arguments: object) -> set[Lease]:
    """The database is away."""
    raise OSError


def test_one_heartbeat_renews_all_leases_and_says_which_are_lost_and_which_are_wanted(engine, channel):
    outbox, subscriptions, leases = Outbox(engine), Subscriptions(channel), Leases(channel)
    names = ("kept", "lost", "wanted", "dropped", "given back")
    for name in names:
        subscriptions.declare(Declaration(name=name, destination="test"))
    taken = {name: leases.acquire(Partition(name), "us", timedelta(seconds=10)) for name in names}
    beats, held = heartbeat(outbox, 10), dict[str, HeldLease]()
    for name, lease in taken.items():
        assert lease is not None
        held[name] = beats.hold(lease, 0.0, Stop())
    leases.acquire(Partition("lost"), "us", timedelta(seconds=10))
    leases.ask(Partition("wanted"), "command")
    beats.drop(held["dropped"])
    leases.release(held["given back"].lease)

    def renewals(name: str) -> int:
        holder = leases.look(Partition(name))
        assert holder is not None
        return holder.renewals

    told = eventually(lambda: held["wanted"].stop.asked and held["lost"].lost and renewals("kept") > 2)
    before = {name: renewals(name) for name in names}
    renewed = eventually(lambda: renewals("kept") > before["kept"] + 2 and renewals("wanted") > before["wanted"])
    after = {name: renewals(name) for name in names}
    beats.close()

    assert (told, renewed) == (True, True)
    assert {name for name, each in held.items() if each.lost} == {"lost", "given back"}
    assert {name for name, each in held.items() if each.stop.asked} == {"wanted"}
    assert {name for name in names if after[name] > before[name]} == {"kept", "wanted"}
