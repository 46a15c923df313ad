"""Subscriptions are what their name says, and one worker at a time has the right to a partition."""

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import LeaseLostError, Outbox, SubscriptionError
from outbox.message import uuid7
from outbox.position import EARLIEST, Position, Progress
from outbox.store.database import Database
from outbox.store.dialect import Channel
from outbox.store.lease import Lease, Leases, Partition
from outbox.store.log import Log
from outbox.store.parked import Aside
from outbox.store.postgresql import POSTGRESQL
from outbox.store.progress import ProgressLog
from outbox.store.sqlite import SQLITE
from outbox.store.subscription import Start, Subscriptions
from outbox.worker import Settings
from outbox.worker.settlement import Settlement
from tests.readers import Collector, declared, delivered, send, texts, worker
from tests.waiting import eventually

LENGTH = timedelta(seconds=10)
PARTITION = Partition("relay")


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox whose subscription nobody has declared yet."""
    return Outbox(engine)


@pytest.fixture
def channel(outbox: Outbox) -> Iterator[Channel]:
    """A connection of this test's own."""
    with closing(outbox.database.open()) as opened:
        yield opened


# What a subscription is


def test_the_first_worker_fixes_what_the_migration_left_open(outbox, channel):
    subscriptions = Subscriptions(outbox.database)
    before = subscriptions.get(channel, "relay")
    subscriptions.declare(channel, declared(topics=("a", "b"), on_dead="continue"))
    after = subscriptions.get(channel, "relay")

    assert (before.destination, before.topics, before.on_dead) == (None, None, None)
    assert after == replace(before, destination="callable:tests", topics=("a", "b"), on_dead="continue")


@pytest.mark.parametrize(
    ("differing", "told"),
    [
        ({"topics": ("orders",)}, "has topics all, this worker asks for orders; .* alter relay --topics orders"),
        (
            {"destination": "nats://elsewhere"},
            "has destination callable:tests, this worker asks for nats://elsewhere; .* alter relay --to nats://elsewhere",
        ),
        (
            {"on_dead": "continue"},
            "has on-dead block, this worker asks for continue; .* alter relay --on-dead continue",
        ),
    ],
)
def test_a_worker_that_declares_something_else_is_refused(outbox, differing, told):
    """Two of one name and different selections would pass over each other's messages."""
    send(outbox, "1")
    assert texts(delivered(outbox.database)) == ["1"]
    send(outbox, "2")

    with pytest.raises(SubscriptionError, match=rf"subscription 'relay' {told}$"):
        delivered(outbox.database, **differing)

    assert texts(delivered(outbox.database)) == ["2"]


def test_a_selection_is_refused_whatever_it_was_before(outbox):
    delivered(outbox.database, topics=("a", "b"))

    for topics in (None, ("a",), ("a", "b", "c"), ()):
        with pytest.raises(SubscriptionError, match="topics a,b"):
            delivered(outbox.database, topics=topics)
    delivered(outbox.database, topics=("a", "b"))


def test_what_a_worker_does_not_say_is_as_it_is_stored(outbox):
    delivered(outbox.database, on_dead="continue")

    delivered(outbox.database)


def test_subscriptions_read_the_same_log_each_on_its_own(outbox):
    send(outbox, "1", "2")
    first = texts(delivered(outbox.database, name="one"))
    send(outbox, "3")

    assert (first, texts(delivered(outbox.database, name="two"))) == (["1", "2"], ["1", "2", "3"])
    assert texts(delivered(outbox.database, name="one")) == ["3"]


def test_a_selection_brings_its_topics_only(outbox):
    with outbox.begin() as session:
        for topic in ("a", "b", "c", "a"):
            outbox.send(session, topic, topic)

    assert texts(delivered(outbox.database, name="some", topics=("a", "c"))) == ["a", "c", "a"]
    assert texts(delivered(outbox.database, name="none", topics=())) == []


def test_an_unknown_name_is_told_which_there_are(outbox, channel):
    delivered(outbox.database, name="billing")

    with pytest.raises(SubscriptionError, match="no subscription 'bilking'; there are: billing, relay"):
        Subscriptions(outbox.database).get(channel, "bilking")


@pytest.mark.parametrize("name", ["a b", "ä😀", "'; DROP TABLE outbox_subscription; --", "%s", ":name", "x" * 500])
def test_a_name_is_kept_as_it_is(outbox, channel, name):
    send(outbox, "1")

    assert texts(delivered(outbox.database, name=name)) == ["1"]
    assert [found.name for found in Subscriptions(outbox.database).all(channel)] == sorted([name, "relay"])


def test_a_dropped_subscription_begins_anew(outbox, channel):
    send(outbox, "1")
    delivered(outbox.database, name="billing")
    Subscriptions(outbox.database).drop(channel, "billing")

    assert Subscriptions(outbox.database).find(channel, "billing") is None
    assert texts(delivered(outbox.database, name="billing", topics=("orders",))) == ["1"]


# Where a new one begins


def begun(outbox: Outbox, start: Start, name: str = "new") -> list[str]:
    """What a subscription delivers that begins at `start` if it is new."""
    return texts(delivered(outbox.database, name=name, start=start))


def test_a_new_subscription_begins_at_the_earliest_message(outbox):
    send(outbox, "1")

    assert begun(outbox, "earliest") == ["1"]


def test_a_new_subscription_may_begin_at_the_latest_position(outbox):
    send(outbox, "1")
    before = begun(outbox, "latest")
    send(outbox, "2")

    assert (before, begun(outbox, "latest")) == ([], ["2"])


def test_where_it_begins_counts_once(outbox):
    """A worker that comes back goes on from where it was."""
    send(outbox, "1")
    begun(outbox, "earliest")
    send(outbox, "2")

    assert begun(outbox, "latest") == ["2"]


MOMENTS = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 2, 3, 5)]


BEGINNINGS = [
    (datetime(2025, 1, 1, tzinfo=UTC), ["0", "1", "2", "3", "4"]),
    (MOMENTS[0], ["0", "1", "2", "3", "4"]),
    (MOMENTS[1], ["1", "2", "3", "4"]),
    (MOMENTS[1].astimezone(timezone(timedelta(hours=9))), ["1", "2", "3", "4"]),
    (MOMENTS[1] + timedelta(milliseconds=1), ["3", "4"]),
    (datetime(2026, 1, 4, tzinfo=UTC), ["4"]),
    (MOMENTS[4], ["4"]),
    (datetime(2027, 1, 1, tzinfo=UTC), []),
]


@pytest.mark.parametrize("holes", [False, True])
def test_a_new_subscription_may_begin_at_a_moment(outbox, holes):
    log = outbox.database.tables.message
    envelope = {"topic": "orders", "slot": 0}
    with outbox.engine.begin() as connection:
        for n, moment in enumerate(MOMENTS):
            place = {"id": 7 * n + 3 if holes else n + 1, "created_at": moment, "message_id": uuid7()}
            connection.execute(log.insert().values(**envelope, **place, body=str(n).encode()))

    found = [begun(outbox, start, name=f"from {n}") for n, (start, _) in enumerate(BEGINNINGS)]

    assert found == [expected for _, expected in BEGINNINGS]


def test_a_moment_in_an_empty_log_is_the_beginning(outbox):
    before = begun(outbox, datetime(2026, 1, 1, tzinfo=UTC))
    send(outbox, "1")

    assert (before, begun(outbox, "earliest")) == ([], ["1"])


def test_what_commits_late_belongs_to_a_moment_by_its_id(pg_engine):
    """The window from a moment on is the rest of the log by ids, and what comes later by commit."""
    outbox = Outbox(pg_engine)
    send(outbox, "1")
    with pg_engine.connect() as connection:
        outbox.send(connection, "orders", "late")
        send(outbox, "2")
        before = begun(outbox, datetime(2026, 1, 1, tzinfo=UTC))
        connection.commit()

    assert (before, begun(outbox, "earliest")) == (["1", "2"], ["late"])


# Leases


def test_a_lease_is_one_worker_s_until_it_is_given_back(outbox, channel):
    leases = Leases(outbox.database)
    mine = leases.acquire(channel, PARTITION, "me", LENGTH)
    assert mine == Lease(PARTITION, 1, "me")
    taken = leases.acquire(channel, PARTITION, "you", LENGTH)
    holder = leases.look(channel, PARTITION)
    assert holder is not None
    leases.release(channel, mine)
    yours = leases.acquire(channel, PARTITION, "you", LENGTH)

    assert (taken, holder.owner, holder.epoch, holder.live) == (None, "me", 1, True)
    assert yours == Lease(PARTITION, 2, "you")


def test_a_renewal_moves_the_end_and_only_the_owner_s_counts(outbox, channel):
    leases = Leases(outbox.database)
    mine = leases.acquire(channel, PARTITION, "me", LENGTH)
    assert mine is not None
    before = leases.look(channel, PARTITION)
    assert leases.renew(channel, mine, timedelta(minutes=1))
    after = leases.look(channel, PARTITION)
    assert not leases.renew(channel, replace(mine, epoch=0), timedelta(hours=1))
    assert before is not None
    assert after is not None
    assert after == leases.look(channel, PARTITION)

    assert (before.renewals, after.renewals) == (0, 1)
    assert before.lease_until is not None
    assert after.lease_until is not None
    assert timedelta(seconds=49) < after.lease_until - before.lease_until < timedelta(seconds=80)


def test_a_late_release_takes_nothing_from_the_next_owner(outbox, channel):
    leases = Leases(outbox.database)
    mine = leases.acquire(channel, PARTITION, "me", timedelta(0))
    yours = leases.acquire(channel, PARTITION, "you", LENGTH)
    assert mine is not None
    leases.release(channel, mine)
    holder = leases.look(channel, PARTITION)
    assert holder is not None

    assert yours == Lease(PARTITION, 2, "you")
    assert (holder.owner, holder.live) == ("you", True)


def test_there_is_no_lease_without_its_subscription(outbox, channel):
    leases = Leases(outbox.database)

    assert leases.acquire(channel, Partition("unknown"), "me", LENGTH) is None
    assert leases.look(channel, Partition("unknown")) is None


CLOCKS = {
    "postgresql": (POSTGRESQL, "(statement_timestamp() + {moved} * interval '1 second')"),
    "sqlite": (SQLITE, "strftime('%Y-%m-%d %H:%M:%f', 'now', '{moved} seconds')"),
}


def moved(engine: Engine, seconds: int) -> Database:
    """The same database, whose clock has been set forward or back."""
    dialect, clock = CLOCKS[engine.dialect.name]
    return Database(engine, dialect=replace(dialect, now=clock.format(moved=f"{seconds:+d}")))


def test_a_lease_expires_by_the_clock_of_the_database(engine, outbox, channel):
    assert Leases(outbox.database).acquire(channel, PARTITION, "me", LENGTH) is not None

    early = Leases(moved(engine, 8)).acquire(channel, PARTITION, "you", LENGTH)
    late = Leases(moved(engine, 12)).acquire(channel, PARTITION, "you", LENGTH)

    assert (early, late) == (None, Lease(PARTITION, 2, "you"))


def test_a_lease_that_does_not_move_is_taken_though_the_clock_stepped_back(engine, outbox, channel):
    """By the database's clock it is good for an hour; the waiter has seen it stand still."""
    leases = Leases(outbox.database)
    assert Leases(moved(engine, 3600)).acquire(channel, PARTITION, "me", LENGTH) is not None
    seen = leases.look(channel, PARTITION)
    assert seen is not None
    wrong = [replace(seen, renewals=seen.renewals + 1), replace(seen, epoch=seen.epoch + 1), None]

    assert [leases.acquire(channel, PARTITION, "you", LENGTH, holder) for holder in wrong] == [None] * 3
    assert leases.acquire(channel, PARTITION, "you", LENGTH, seen) == Lease(PARTITION, 2, "you")


def test_a_worker_waits_for_a_lease_that_stands_still_no_longer_than_a_lease(engine, outbox, channel):
    Subscriptions(outbox.database).declare(channel, declared())
    assert Leases(moved(engine, 3600)).acquire(channel, PARTITION, "gone", LENGTH) is not None
    send(outbox, "1")

    settings = Settings(lease=timedelta(seconds=1), renew_every=timedelta(milliseconds=300))
    assert texts(delivered(outbox.database, settings=settings)) == ["1"]


def test_two_workers_share_nothing(outbox):
    """The second one waits; what it delivers after the first has stopped is only what came after."""
    settings = Settings(lease=timedelta(seconds=2), renew_every=timedelta(milliseconds=300))
    handlers = [Collector(), Collector()]
    workers = [worker(outbox.database, handler, settings=settings) for handler in handlers]
    threads = [threading.Thread(target=each.run) for each in workers]
    send(outbox, "1")
    threads[0].start()
    assert eventually(lambda: handlers[0].bodies == [b"1"])
    threads[1].start()
    for n in range(2, 6):
        send(outbox, str(n))
    assert eventually(lambda: len(handlers[0].messages) == 5)
    workers[0].stop()
    threads[0].join(20)
    send(outbox, "6")
    assert eventually(lambda: len(handlers[1].messages) == 1)
    workers[1].stop()
    threads[1].join(20)

    assert [texts(handler.messages) for handler in handlers] == [["1", "2", "3", "4", "5"], ["6"]]


# Fences


def zombie(outbox: Outbox, channel: Channel) -> tuple[Settlement, Lease]:
    """Who had the lease, and has not noticed yet that another one has it."""
    leases = Leases(outbox.database)
    incarnation = Log(outbox.database).now(channel).incarnation
    Subscriptions(outbox.database).declare(channel, declared())
    mine = leases.acquire(channel, PARTITION, "me", timedelta(0))
    assert mine is not None
    yours = leases.acquire(channel, PARTITION, "you", LENGTH)
    assert yours is not None
    return Settlement(outbox.database, channel, mine, incarnation), yours


def test_a_worker_without_its_lease_settles_nothing(outbox, channel):
    settlement, _ = zombie(outbox, channel)

    with pytest.raises(LeaseLostError, match="another worker owns it now"):
        settlement.settle(Progress(Position(900)), [])

    stored = ProgressLog(outbox.database).newest(channel, PARTITION)
    assert stored is not None
    assert stored.progress == Progress(EARLIEST)


def test_a_worker_without_its_lease_parks_nothing(outbox, channel):
    settlement, _ = zombie(outbox, channel)
    send(outbox, "1")
    reading = Log(outbox.database).read_on(channel, EARLIEST)
    fates = [(reading.messages[0], Aside(state="dead", blocks=True, error="?"))]

    with pytest.raises(LeaseLostError):
        settlement.settle(Progress(Position(900)), fates)

    assert channel.rows("SELECT count(*) FROM outbox_parked") == [(0,)]
    assert texts(delivered_after(outbox)) == ["1"]


def delivered_after(outbox: Outbox) -> list[Any]:
    """What the next owner delivers, once the lease is free."""
    with outbox.engine.begin() as connection:
        connection.execute(text("UPDATE outbox_lease SET lease_until = NULL"))
    return delivered(outbox.database)


def test_the_owner_settles_beside_a_zombie(outbox, channel):
    stale, lease = zombie(outbox, channel)
    incarnation = Log(outbox.database).now(channel).incarnation
    owner = Settlement(outbox.database, channel, lease, incarnation)

    owner.settle(Progress(Position(5)), [])
    with pytest.raises(LeaseLostError):
        stale.settle(Progress(Position(9)), [])
    owner.settle(Progress(Position(7)), [])

    stored = ProgressLog(outbox.database).newest(channel, PARTITION)
    assert stored is not None
    assert stored.progress == Progress(Position(7))


def test_a_transaction_of_the_owner_holds_the_lease_until_its_end(pg_engine):
    """Who takes it over waits, so that what is written under the old epoch is there before."""
    outbox = Outbox(pg_engine)
    leases = Leases(outbox.database)
    with closing(outbox.database.open()) as mine, closing(outbox.database.open()) as yours:
        incarnation = Log(outbox.database).now(mine).incarnation
        lease = leases.acquire(mine, PARTITION, "me", timedelta(0))
        assert lease is not None
        taken: list[Lease | None] = []
        taker = threading.Thread(target=lambda: taken.append(leases.acquire(yours, PARTITION, "you", LENGTH)))
        with Settlement(outbox.database, mine, lease, incarnation).held():
            taker.start()
            assert not eventually(lambda: bool(taken), 0.3)
        taker.join(10)

    assert taken == [Lease(PARTITION, 2, "you")]
