"""Standing by: a lease is taken from nobody who is well, whatever the clocks and the lengths are."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox, Relay
from outbox.model.lease import Holder, Lease, Partition
from outbox.store import identity
from outbox.store.database import Channel
from outbox.store.log.log import Limits
from outbox.store.subscriptions.leases import Leases, LeaseWatch
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker import upkeep
from outbox.worker.calls import Call, Handler
from outbox.worker.settings import Settings
from tests.support.destination import Destination, fill, relay_to
from tests.support.leases import epoch, step_clock
from tests.support.waiting import eventually

TEN = timedelta(seconds=10)


def held(renewals: int, length: timedelta | None = TEN, epoch: int = 1) -> Holder:
    """A holder, as a look shows it."""
    return Holder("other", epoch, renewals, None, live=False, length=length)


class Looks:
    """A worker that stands by, and its clock."""

    def __init__(self, length: timedelta) -> None:
        self.now = 1000.0
        self._watch = LeaseWatch(length, lambda: self.now)

    def __call__(self, holder: Holder, *, after: float = 0.0) -> bool:
        """Look after so many seconds; return whether the lease may be claimed, as it is seen now."""
        self.now += after
        claim = self._watch.look(holder)
        assert claim in (None, holder)
        return claim is not None


@pytest.mark.parametrize("live", [True, False], ids=["good", "expired"])
def test_a_lease_is_not_claimed_at_the_first_look_whatever_the_clock_of_the_database_says(live):
    """That clock may have stepped forward a moment ago, and the holder is well."""
    look = Looks(TEN)
    holder = replace(held(5), live=live)

    assert [look(holder), look(holder, after=9.9), look(holder, after=0.2)] == [False, False, True]


def test_a_lease_that_moves_stays_with_its_holder():
    look = Looks(TEN)
    look(held(5))

    assert not look(held(6), after=9.9)
    assert not look(held(6), after=9.9)
    assert look(held(6), after=0.2)
    assert not look(held(0, epoch=2), after=0.2)


@pytest.mark.parametrize(("mine", "theirs", "claimed"), [(1, 10, 10), (10, 1, 1), (10, None, 10)])
def test_a_lease_that_stands_still_is_claimed_after_the_length_of_its_holder(mine, theirs, claimed):
    """Though it has not expired by the clock of the database, which may have stepped back."""
    look = Looks(timedelta(seconds=mine))
    holder = replace(held(5, None if theirs is None else timedelta(seconds=theirs)), live=True)
    look(holder)

    assert not look(holder, after=claimed - 0.1)
    assert look(holder, after=0.2)


def settings(lease: float, renew_every: float) -> Settings:
    """Short pauses, and a lease of so many seconds."""
    return Settings(
        limits=Limits(rows=50),
        poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
        lease=timedelta(seconds=lease),
        renew_every=timedelta(seconds=renew_every),
    )


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Holder]:
    """The holders at each look of a worker that watches a lease."""
    seen, look = list[Holder](), LeaseWatch.look

    def noted(watch: LeaseWatch, holder: Holder) -> Holder | None:
        claim = look(watch, holder)
        seen.append(holder)
        return claim

    monkeypatch.setattr(LeaseWatch, "look", noted)
    return seen


@contextmanager
def two_at_work(engine: Engine, first: Settings, second: Settings) -> Iterator[tuple[Destination, Relay, Relay]]:
    """A relay that works, and one that stands by, in this order."""
    destination = Destination()
    relays = [relay_to(destination, Outbox(engine), settings=each) for each in (first, second)]
    relays[0].start()
    assert eventually(lambda: epoch(engine) == 1)
    relays[1].start()
    try:
        yield destination, relays[0], relays[1]
    finally:
        for relay in relays:
            relay.stop()
        for relay in relays:
            relay.join(60)


@pytest.mark.storm
def test_a_worker_that_stands_by_looks_at_the_lease_and_does_not_try_to_take_it(engine, looks, monkeypatch):
    """A lease in other hands cannot be taken, and ten workers that try write thirty times a second."""
    tried, acquire = list[str](), Leases.acquire

    def noted(leases: Leases, partition: Partition, owner: str, *more: Any, **named: Any) -> Lease | None:
        tried.append(owner)
        return acquire(leases, partition, owner, *more, **named)

    monkeypatch.setattr(Leases, "acquire", noted)
    with two_at_work(engine, settings(60, 20), settings(60, 20)):
        assert eventually(lambda: len(looks) > 4)
        before = len(tried)

    # The other one takes over when the first gives the lease back.
    assert before == 1


def test_a_worker_that_waits_for_a_subscription_asks_for_nothing_else(pg_engine, monkeypatch):
    """Every relay waits for its backfill, which most never have."""
    monkeypatch.setattr(upkeep, "FIND_BACKFILL", 0.01)
    verified, found = list[Channel](), list[str]()
    verify, find = identity.verify, Subscriptions.find

    def noted(channel: Channel) -> None:
        verified.append(channel)
        verify(channel)

    def sought(subscriptions: Subscriptions, name: str) -> Any:
        found.append(name)
        return find(subscriptions, name)

    monkeypatch.setattr(identity, "verify", noted)
    monkeypatch.setattr(Subscriptions, "find", sought)
    with Outbox(pg_engine).running(lambda message: None):
        assert eventually(lambda: found.count("relay:backfill") > 2)
        before = len(verified)
        assert eventually(lambda: found.count("relay:backfill") > 6)
        after = len(verified)

    assert after == before


@pytest.mark.storm
def test_a_shorter_lease_takes_none_from_a_longer_one(engine, caplog, looks):
    """A roll-out that changes the length has both at the same time; the log says so once."""
    outbox = Outbox(engine)
    with two_at_work(engine, settings(60, 20), settings(1, 0.3)) as (destination, _, _):
        # At least 0.2 s apart, and so for longer than the shorter lease.
        assert eventually(lambda: len(looks) > 6)
        fill(outbox, 60)
        arrived = eventually(lambda: len(destination.messages) >= 60)
        taken = epoch(engine)

    differ = "the lease of the other worker is 60 s long, that of this worker 1 s; give both the same length"
    assert (arrived, taken, caplog.text.count(differ)) == (True, 1, 1)
    assert sorted(map(int, destination.bodies)) == list(range(60))


@pytest.mark.storm
def test_a_clock_that_steps_forward_takes_no_lease_from_its_holder(engine, looks):
    """For a moment it has expired, by that clock."""
    outbox = Outbox(engine)
    with two_at_work(engine, settings(60, 20), settings(60, 20)) as (destination, _, _):
        for n in range(2):
            before = len(looks)
            assert eventually(lambda: len(looks) > before + 1)  # noqa: B023 - asked at once
            step_clock(engine, timedelta(hours=1))
            fill(outbox, 1, first=n)
        before = len(looks)
        arrived = eventually(lambda: len(destination.messages) >= 2 and len(looks) > before + 1)
        taken = epoch(engine)

    assert (arrived, taken) == (True, 1)
    assert sorted(map(int, destination.bodies)) == list(range(2))


def test_a_worker_that_begins_after_a_step_of_the_clock_takes_no_lease_from_a_worker_that_is_well(
    engine, channel, looks
):
    """The holder has not renewed since the step, so its lease looks expired to everyone who has not watched it."""
    outbox, destination = Outbox(engine), Destination()
    relay_to(destination, outbox).until_empty()
    lease = Leases(channel).acquire(Partition("relay"), "w0rker", timedelta(seconds=20))
    assert lease is not None
    step_clock(engine, timedelta(hours=1))
    fill(outbox, 1)
    relay = relay_to(destination, outbox)
    before = len(looks)
    relay.start()
    try:
        assert eventually(lambda: len(looks) > before + 3)
        renewed = Leases(channel).renew(lease, timedelta(seconds=20))
        early = list(destination.bodies)
        Leases(channel).release(lease)
        arrived = eventually(lambda: destination.bodies == [b"0"])
    finally:
        relay.stop()
        relay.join(60)

    assert (renewed, early, arrived) == (True, [], True)


@pytest.mark.every_database
def test_no_call_begins_after_the_lease_has_gone_to_another(engine, monkeypatch):
    """Between the look at the lease and the call lies a change of threads, and both may sleep for any time."""
    outbox, released, sleeps = Outbox(engine), threading.Event(), threading.Event()
    perform, renew = Call.perform, Leases.renew_all
    asleep: set[threading.Thread] = set()

    def late(call: Call, handler: Handler) -> None:
        if not sleeps.is_set():
            asleep.update(threading.enumerate())
            sleeps.set()
            released.wait(60)
        perform(call, handler)

    def stuck(*arguments: Any) -> set[Lease]:
        if threading.current_thread() in asleep:
            released.wait(60)
        return renew(*arguments)

    monkeypatch.setattr(Call, "perform", late)
    monkeypatch.setattr(Leases, "renew_all", stuck)
    frozen, well = Destination(), Destination()
    first = relay_to(frozen, outbox, settings=settings(1, 0.3), deadline=timedelta(seconds=30))
    second = relay_to(well, Outbox(engine), settings=settings(60, 20))
    first.start()
    fill(outbox, 1)
    assert sleeps.wait(60)
    second.start()
    taken_over = eventually(lambda: well.bodies == [b"0"])
    released.set()
    fill(outbox, 1, first=1)
    went_on = eventually(lambda: well.bodies + frozen.bodies == [b"0", b"1"])
    for relay in (first, second):
        relay.stop()
        relay.join(60)

    assert (taken_over, went_on) == (True, True)
    assert b"0" not in frozen.bodies
