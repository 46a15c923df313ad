"""One worker at a time has the right to a partition; who lost it settles nothing."""

import threading
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import LeaseLostError, Outbox
from outbox.model.lease import Lease, Partition
from outbox.model.parking import Parking
from outbox.model.position import EARLIEST, Position, Progress
from outbox.store.database import Channel, Database
from outbox.store.dialects.postgresql.dialect import DIALECT as POSTGRESQL
from outbox.store.dialects.sqlite.dialect import DIALECT as SQLITE
from outbox.store.log.log import Log
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.settle import Settlement
from tests.support.dialects import database_of, varied
from tests.support.readers import QUICK, Collector, declared, delivered, send, texts, waiting, worker
from tests.support.waiting import eventually

LENGTH = timedelta(seconds=10)
PARTITION = Partition("relay")


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox whose subscription nobody has declared yet."""
    return Outbox(engine)


def test_a_lease_is_one_worker_s_until_it_is_given_back(outbox, channel):
    leases = Leases(channel)
    mine = leases.acquire(PARTITION, "me", LENGTH)
    assert mine == Lease(PARTITION, 1, "me")
    taken = leases.acquire(PARTITION, "you", LENGTH)
    holder = leases.look(PARTITION)
    assert holder is not None
    leases.release(mine)
    yours = leases.acquire(PARTITION, "you", LENGTH)

    assert (taken, holder.owner, holder.epoch, holder.live) == (None, "me", 1, True)
    assert yours == Lease(PARTITION, 2, "you")


def test_a_lease_of_a_subscription_that_was_dropped_is_none_of_the_next_of_its_name(outbox, channel):
    """Epochs begin anew: a worker that was frozen meanwhile has the epoch of its successor."""
    subscriptions, leases, incarnation = Subscriptions(channel), Leases(channel), Log().now(channel).incarnation
    old = leases.acquire(PARTITION, "frozen", LENGTH)
    with subscriptions.changing():
        subscriptions.drop("relay")
    subscriptions.declare(declared())
    new = leases.acquire(PARTITION, "new", LENGTH)
    assert old is not None
    assert new is not None

    renewed = leases.renew(old, LENGTH)
    settled = ProgressLog(channel).settle(old, 1, Progress(EARLIEST), incarnation)
    leases.release(old)
    with channel.transaction():
        held = [leases.hold(each, incarnation) for each in (old, new)]

    assert (old.epoch, renewed, settled, held) == (new.epoch, False, False, [False, True])


def test_a_renewal_moves_the_end_and_only_the_owner_s_counts(outbox, channel):
    leases = Leases(channel)
    mine = leases.acquire(PARTITION, "me", LENGTH)
    assert mine is not None
    before = leases.look(PARTITION)
    assert leases.renew(mine, timedelta(minutes=1))
    after = leases.look(PARTITION)
    assert not leases.renew(replace(mine, epoch=0), timedelta(hours=1))
    assert before is not None
    assert after is not None
    assert after == leases.look(PARTITION)

    assert (before.renewals, after.renewals) == (0, 1)
    assert before.lease_until is not None
    assert after.lease_until is not None
    assert timedelta(seconds=49) < after.lease_until - before.lease_until < timedelta(seconds=80)


def test_a_late_release_takes_nothing_from_the_next_owner(outbox, channel):
    leases = Leases(channel)
    mine = leases.acquire(PARTITION, "me", LENGTH)
    yours = leases.acquire(PARTITION, "you", LENGTH, leases.look(PARTITION))
    assert mine is not None
    leases.release(mine)
    holder = leases.look(PARTITION)
    assert holder is not None

    assert yours == Lease(PARTITION, 2, "you")
    assert (holder.owner, holder.live) == ("you", True)


def test_there_is_no_lease_without_its_subscription(outbox, channel):
    leases = Leases(channel)

    assert leases.acquire(Partition("unknown"), "me", LENGTH) is None
    assert leases.look(Partition("unknown")) is None


CLOCKS = {
    "postgresql": (POSTGRESQL, "(statement_timestamp() + {moved} * interval '1 second')"),
    "sqlite": (SQLITE, "strftime('%Y-%m-%d %H:%M:%f', 'now', '{moved} seconds')"),
}


def moved(engine: Engine, seconds: int) -> Database:
    """The same database, whose clock has been set forward or back."""
    dialect, clock = CLOCKS[engine.dialect.name]
    return database_of(engine, varied(dialect, now=clock.format(moved=f"{seconds:+d}")))


def acquired(database: Database, owner: str, length: timedelta = LENGTH) -> Lease | None:
    """Try to take the lease, by the clock of this database."""
    with closing(database.open()) as channel:
        return Leases(channel).acquire(PARTITION, owner, length)


@pytest.mark.parametrize("step", [3600, -3600], ids=["forward", "back"])
def test_a_lease_is_taken_from_its_holder_only_as_it_was_seen(engine, outbox, channel, step):
    """Whether it has expired by the database's clock says nothing, because that clock may step."""
    leases = Leases(channel)
    assert acquired(moved(engine, -step), "me") is not None
    seen = leases.look(PARTITION)
    assert seen is not None
    wrong = [replace(seen, renewals=seen.renewals + 1), replace(seen, epoch=seen.epoch + 1), None]

    assert [leases.acquire(PARTITION, "you", LENGTH, claim) for claim in wrong] == [None] * 3
    assert leases.acquire(PARTITION, "you", LENGTH, seen) == Lease(PARTITION, 2, "you")


def test_a_worker_waits_for_a_lease_that_stands_still_no_longer_than_a_lease(engine, outbox, channel):
    Subscriptions(channel).declare(declared())
    assert acquired(moved(engine, 3600), "gone", timedelta(seconds=1)) is not None
    send(outbox, "1")

    assert texts(delivered(outbox.database, settings=QUICK)) == ["1"]


def test_two_workers_share_nothing(outbox):
    """The second one waits; what it delivers after the first has stopped is only what came after."""
    handlers = [Collector(), Collector()]
    workers = [worker(outbox.database, handler, settings=QUICK) for handler in handlers]
    threads = [threading.Thread(target=each.run) for each in workers]
    send(outbox, "1")
    threads[0].start()
    assert eventually(lambda: handlers[0].bodies == [b"1"])
    threads[1].start()
    for n in range(2, 6):
        send(outbox, str(n))
    assert eventually(lambda: len(handlers[0].messages) == 5)
    workers[0].stop()
    threads[0].join(60)
    send(outbox, "6")
    assert eventually(lambda: len(handlers[1].messages) == 1)
    workers[1].stop()
    threads[1].join(60)

    assert [texts(handler.messages) for handler in handlers] == [["1", "2", "3", "4", "5"], ["6"]]


# Fences


def zombie(outbox: Outbox, channel: Channel) -> tuple[Settlement, Lease]:
    """Who had the lease, and has not noticed yet that another one has it."""
    leases = Leases(channel)
    incarnation = Log().now(channel).incarnation
    Subscriptions(channel).declare(declared())
    mine = leases.acquire(PARTITION, "me", LENGTH)
    assert mine is not None
    yours = leases.acquire(PARTITION, "you", LENGTH, leases.look(PARTITION))
    assert yours is not None
    return Settlement(channel, mine, incarnation), yours


def test_a_worker_without_its_lease_settles_nothing(outbox, channel):
    settlement, _ = zombie(outbox, channel)

    with pytest.raises(LeaseLostError, match="another worker owns it now"):
        settlement.settle(Progress(Position(900)), [])

    stored = ProgressLog(channel).newest(PARTITION)
    assert stored is not None
    assert stored.progress == Progress(EARLIEST)


def test_a_worker_without_its_lease_parks_nothing(outbox, channel):
    settlement, _ = zombie(outbox, channel)
    send(outbox, "1")
    reading = Log().read_on(channel, EARLIEST)
    parkings = [(reading.messages[0], Parking(state="dead", holds=True, error="?"))]

    with pytest.raises(LeaseLostError):
        settlement.settle(Progress(Position(900)), parkings)

    assert channel.rows("SELECT count(*) FROM outbox_parked") == [(0,)]
    assert texts(delivered_after(outbox)) == ["1"]


def delivered_after(outbox: Outbox) -> list[Any]:
    """What the next owner delivers, once the lease is free."""
    with outbox.engine.begin() as connection:
        connection.execute(text("UPDATE outbox_lease SET lease_until = NULL"))
    return delivered(outbox.database)


def test_the_owner_settles_beside_a_zombie(outbox, channel):
    stale, lease = zombie(outbox, channel)
    incarnation = Log().now(channel).incarnation
    owner = Settlement(channel, lease, incarnation)

    owner.settle(Progress(Position(5)), [])
    with pytest.raises(LeaseLostError):
        stale.settle(Progress(Position(9)), [])
    owner.settle(Progress(Position(7)), [])

    stored = ProgressLog(channel).newest(PARTITION)
    assert stored is not None
    assert stored.progress == Progress(Position(7))


def test_a_transaction_of_the_owner_holds_the_lease_until_its_end(pg_engine):
    """Who takes it over waits, so that what is written under the old epoch is there before."""
    outbox = Outbox(pg_engine)
    with closing(outbox.database.open()) as mine, closing(outbox.database.open()) as yours:
        incarnation = Log().now(mine).incarnation
        lease = Leases(mine).acquire(PARTITION, "me", LENGTH)
        assert lease is not None
        seen = Leases(yours).look(PARTITION)
        taken: list[Lease | None] = []
        taker = threading.Thread(target=lambda: taken.append(Leases(yours).acquire(PARTITION, "you", LENGTH, seen)))
        with Settlement(mine, lease, incarnation).held():
            taker.start()
            waits = eventually(lambda: waiting(pg_engine) == 1)
            before = list(taken)
        taker.join(60)

    assert (waits, before) == (True, [])
    assert taken == [Lease(PARTITION, 2, "you")]
