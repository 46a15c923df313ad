"""A worker, its lease and its end: when it may hand over, when another takes its place, and how it is stopped."""

import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox import Message, Outbox, Reject, Relay, StandbyError
from outbox.model.lease import Partition
from outbox.model.position import Capture
from outbox.runtime import failpoints
from outbox.store.log.log import Limits, Log
from outbox.store.subscriptions.leases import Leases
from outbox.worker.calls import HeldLease
from outbox.worker.connection import Heartbeat
from outbox.worker.settings import Settings
from tests.support.deadlines import overdue_when_hanging
from tests.support.destination import LONG_LEASE, Destination, failing, fill, relay_to
from tests.support.leases import lease_left, step_clock
from tests.support.parked import states
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
#: Of a worker that is dead, and that nobody has to renew.
LEASE = timedelta(seconds=1)
BRISK = Settings(
    limits=Limits(rows=5),
    poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
    lease=LONG_LEASE,
    renew_every=timedelta(milliseconds=300),
)


#: So long a look at a lease takes, for its worker.
LOOK_SECONDS = 10


def take_lease(outbox: Outbox, length: timedelta) -> None:
    """As a worker that is killed right after."""
    channel = outbox.database.open()
    assert Leases(channel).acquire(Partition("relay"), "dead", length) is not None
    channel.close()


@pytest.mark.every_database
def test_the_place_of_a_killed_worker_is_taken_when_its_lease_ends(engine):
    outbox, destination = Outbox(engine), Destination()
    fill(outbox, 10)
    relay, began = relay_to(destination, outbox, settings=BRISK), time.monotonic()
    take_lease(outbox, LEASE)

    relay.start()
    arrived = eventually(lambda: len(destination.messages) == 10)
    took = time.monotonic() - began
    relay.stop()
    relay.join(60)

    assert arrived
    assert took >= LEASE.total_seconds()


@pytest.mark.every_database
def test_a_lease_that_nobody_renews_is_taken_although_the_clock_went_back(engine):
    """By the database's clock it is good for an hour; by the waiter's own nobody has renewed it for a whole lease."""
    outbox, destination = Outbox(engine), Destination()
    fill(outbox, 10)
    take_lease(outbox, LEASE)
    step_clock(engine, timedelta(hours=-1))
    relay = relay_to(destination, outbox, settings=BRISK)

    relay.start()
    arrived = eventually(lambda: len(destination.messages) == 10)
    relay.stop()
    relay.join(60)

    assert arrived


def test_a_worker_whose_renewals_fail_hands_nothing_over_when_its_lease_runs_out(pg_engine, monkeypatch):
    """Each call finds the lease good for its whole deadline, and goes on under the next one. Each look takes long."""
    outbox, left = Outbox(pg_engine), []
    found, until, passed = threading.local(), HeldLease.__dict__["until"].__get__, Counter[int]()

    def looked(held):
        passed[held.lease.epoch] += LOOK_SECONDS
        found.at, found.passed = time.monotonic(), passed[held.lease.epoch]
        return until(held) - found.passed

    def renew(*arguments, **options):
        raise PoolTimeout

    def slow(messages):
        # The call's thread found the lease good, and may have stood still since then.
        left.append(lease_left(pg_engine) - found.passed + time.monotonic() - found.at)
        return False

    monkeypatch.setattr(Leases, "renew_all", renew)
    monkeypatch.setattr(HeldLease, "until", property(looked))
    destination = Destination()
    destination.hanging = slow
    fill(outbox, 60)
    deadline = timedelta(minutes=2)
    with pg_engine.connect() as connection:
        (before,) = connection.execute(text("SELECT epoch FROM outbox_lease")).one()
    relay = relay_to(destination, outbox, settings=BRISK, deadline=deadline)

    relay.start()
    arrived = eventually(lambda: len(set(destination.bodies)) == 60, 240)
    relay.stop()
    relay.join(60)

    with pg_engine.connect() as connection:
        (after,) = connection.execute(text("SELECT epoch FROM outbox_lease")).one()
    assert arrived
    assert after > before + 1, "the lease never ran out: nothing was tried"
    assert min(left) > deadline.total_seconds() - 0.1


def in_a_transaction(engine: Engine) -> int:
    """How many connections are idle in a transaction."""
    idle = "datname = current_database() AND state = 'idle in transaction'"
    with engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM pg_stat_activity WHERE {idle}")).scalar_one())


def test_a_worker_that_slept_in_a_transaction_begins_again(pg_engine, monkeypatch):
    """The server has ended its connection meanwhile; the worker opens another one."""
    settings = "SET idle_in_transaction_session_timeout = '1s'"
    monkeypatch.setattr("outbox.store.dialects.postgresql.channel._SETTINGS", settings)
    outbox, destination = Outbox(pg_engine), Destination(failing({b"0"}, Reject("never")))
    fill(outbox, 10, keys=10)
    ended = list[bool]()

    def reached(name: str) -> None:
        if name == "worker.after_park" and not ended:
            ended.append(eventually(lambda: not in_a_transaction(pg_engine)))

    relay = relay_to(destination, outbox, settings=BRISK)
    failpoints.arm(reached)
    try:
        relay.start()
        settled = eventually(lambda: states(pg_engine) == {"dead": 1})
        with outbox.begin() as session:
            outbox.send(session, "t", b"fresh")
        arrived = eventually(lambda: b"fresh" in destination.bodies)
    finally:
        failpoints.arm(None)
        relay.stop()
        relay.join(60)

    assert (ended, settled, arrived) == ([True], True, True)


def test_a_stop_is_heard_beside_calls_that_hang(pg_engine):
    """The lease runs out by itself then: another worker would send what those calls have beside them."""
    outbox, destination = Outbox(pg_engine), Destination()
    over = threading.Event()
    destination.hanging = lambda _messages: not over.is_set()
    fill(outbox, 10)
    relay = relay_to(overdue_when_hanging(destination), outbox, settings=BRISK)
    relay.start()
    assert eventually(lambda: destination.calls > 1)
    relay.stop()
    relay.join(60)
    assert relay._supervisor is not None
    alive, left = relay._supervisor.alive, lease_left(pg_engine)
    over.set()

    assert not alive
    assert left > 0, "the lease was given back"


def test_a_worker_that_loses_its_connection_takes_its_own_lease_back(pg_engine):
    """Nobody else has it, so nobody has to wait until it runs out; the next epoch fences what it was at."""
    outbox, destination = Outbox(pg_engine), Destination()
    long = Settings(lease=timedelta(minutes=2), renew_every=timedelta(seconds=30))
    relay = relay_to(destination, outbox, settings=long)
    relay.start()
    fill(outbox, 1)
    eventually(lambda: len(destination.messages) == 1)
    with pg_engine.connect() as connection:
        mine = "pg_backend_pid() <> pid AND datname = current_database() AND query NOT ILIKE '%notify%'"
        connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {mine}"))
    fill(outbox, 1, first=1)
    arrived = eventually(lambda: len(destination.messages) == 2)
    relay.stop()
    relay.join(60)

    with pg_engine.connect() as connection:
        epochs = connection.execute(text("SELECT epoch FROM outbox_lease")).scalars().all()
    assert (arrived, epochs) == (True, [2])


STOPPED_WHILE_IT_RESTS = """
import random, signal
from outbox import Outbox, create_engine
from outbox.runtime.stop import Stop
from outbox.worker.worker import Worker

stop = Stop()
worker = Worker(Outbox(create_engine("sqlite:///never-opened")).database, [], stop=stop)
signal.signal(signal.SIGALRM, lambda *_: stop.ask())
for _ in range(600):
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.0002))
    for _ in range(50):
        worker.wake.wait(0)
print("awake")
"""


def test_a_signal_may_come_at_any_moment(tmp_path):
    """Also in the middle of whatever the worker rests with, whose locks its handler must not want."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_WHILE_IT_RESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.stdout == "awake\n", done.stderr


def test_a_lease_is_given_back_when_there_is_no_connection_for_its_renewals(pg_engine, monkeypatch):
    """Else the worker would wait for its own lease to run out."""
    outbox, destination = Outbox(pg_engine), Destination()
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", b"1")])
    failures = [PoolTimeout("all taken")]
    hold = Heartbeat.hold

    def held(*arguments):
        if failures:
            raise failures.pop()
        return hold(*arguments)

    monkeypatch.setattr(Heartbeat, "hold", held)
    relay = relay_to(
        destination,
        outbox,
        settings=Settings(lease=timedelta(minutes=5), renew_every=timedelta(seconds=3)),
    )

    relay.start()
    arrived = eventually(lambda: len(destination.messages) == 1)
    relay.stop()
    relay.join(60)

    assert (failures, arrived) == ([], True)


@pytest.mark.storm
def test_a_worker_sits_out_a_failover_but_does_not_begin_on_a_standby(engine, monkeypatch):
    """The address may lead to a standby for a while, until that is promoted."""
    outbox, destination = Outbox(engine), Destination()
    relay = relay_to(destination, outbox)
    fill(outbox, 1)
    relay.start()
    assert eventually(lambda: len(destination.messages) == 1)

    refused: list[Log] = []

    def standby(log: Log, *_answer: object) -> Capture:
        refused.append(log)
        raise StandbyError("this server is a standby")

    with monkeypatch.context() as failed_over:
        for read in ("now", "read_on"):
            failed_over.setattr(Log, read, standby)
        fill(outbox, 1)
        with pytest.raises(StandbyError):
            Relay(outbox, Destination(), name="other").until_empty()
        met = len(refused)
        assert eventually(lambda: len(refused) >= met + 3)
    arrived = eventually(lambda: len(destination.messages) == 2)
    relay.stop()
    relay.join(60)

    assert arrived
