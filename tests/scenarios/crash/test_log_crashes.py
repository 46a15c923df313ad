"""A crash gives out again the ids that were drawn and not flushed; no position from before it settles anything."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from outbox import LeaseLostError, Outbox, create_engine, migrate
from outbox.model.lease import Lease, Partition
from outbox.model.position import Progress
from outbox.store.database import Channel, Database
from outbox.store.log.log import Log
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.testing.servers import PostgresServer
from outbox.worker.settle import Settlement
from tests.support.readers import QUICK, Collector, declared, delivered, send, texts, worker
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


@pytest.fixture
def durable() -> Iterator[PostgresServer]:
    """A server of this test, with PostgreSQL's own defaults, that writes its log as late as it may."""
    with PostgresServer(durable=True, settings={"wal_writer_delay": "10s", "autovacuum": "off"}) as server:
        migrate.upgrade(create_engine(server.url()))
        yield server


def burn_ids(server: PostgresServer, count: int) -> None:
    """Transactions that draw an id and roll back; nothing of them is flushed."""
    url = server.url().replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(count):
            connection.execute("BEGIN")
            connection.execute("SELECT pg_current_xact_id()")
            connection.execute("ROLLBACK")


def crash_postmaster(server: PostgresServer) -> None:
    """As a machine that loses its power does."""
    server.kill()
    server.start()


def crash_backend(server: PostgresServer) -> None:
    """One connection is killed; the server recovers under the same postmaster."""
    url = server.url().replace("+psycopg", "")
    with psycopg.connect(url) as witness, psycopg.connect(url) as victim:
        os.kill(victim.info.backend_pid, signal.SIGKILL)
        # Until the postmaster has seen the death it takes new connections as if nothing had happened.
        assert eventually(lambda: not alive(witness))
    assert eventually(lambda: answers(server))


def alive(connection: psycopg.Connection) -> bool:
    """Whether the server still serves `connection`."""
    try:
        connection.execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


def answers(server: PostgresServer) -> bool:
    """Whether the server takes connections."""
    try:
        psycopg.connect(server.url().replace("+psycopg", "")).close()
    except psycopg.OperationalError:
        return False
    return True


CRASHES = [crash_postmaster, crash_backend]


def held(channel: Channel) -> tuple[Lease, Settlement]:
    """The lease of the relay, and what settles under it on the server as it is now."""
    Subscriptions(channel).declare(declared())
    lease = Leases(channel).acquire(Partition("relay"), "tests", timedelta(minutes=5))
    assert lease is not None
    return lease, Settlement(channel, lease, Log().now(channel).incarnation)


@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: crash.__name__)
def test_a_position_from_before_a_crash_settles_nothing(durable, crash):
    """Its ids are given out again: with it, the messages that draw them would be passed over."""
    engine = create_engine(durable.url())
    outbox = Outbox(engine)
    database = outbox.database
    send(outbox, "1")
    before = database.open()
    lease, _ = held(before)
    stored = ProgressLog(before).newest(lease.partition)
    burn_ids(durable, 200)
    ahead = Log().now(before)

    crash(durable)

    engine.dispose()
    after = database.open()
    behind = Log().now(after)
    assert behind.position.head < ahead.position.head, "the crash gave no ids back, so this shows nothing"
    assert behind.incarnation != ahead.incarnation
    stale = Settlement(after, lease, ahead.incarnation)
    with pytest.raises(LeaseLostError, match="the server was restarted"):
        stale.settle(Progress(ahead.position), [])
    with pytest.raises(LeaseLostError), stale.held():
        pytest.fail("nothing may be written")
    assert ProgressLog(after).newest(lease.partition) == stored
    after.close()
    before.close()

    send(outbox, "2")
    wait_for_the_lease(database)
    assert texts(delivered(database)) == ["1", "2"]


def wait_for_the_lease(database: Database) -> None:
    """As if the lease that the crash interrupted had expired."""
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE outbox_lease SET lease_until = NULL"))


@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: crash.__name__)
def test_a_worker_delivers_what_was_committed_after_a_crash(durable, crash):
    """It has polled a head that the crash took back, and must not go on from there."""
    engine = create_engine(durable.url())
    outbox = Outbox(engine)
    handler = Collector()
    relay = worker(outbox.database, handler, settings=QUICK)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        send(outbox, "1")
        assert eventually(lambda: len(handler.messages) == 1)
        burn_ids(durable, 300)
        time.sleep(0.3)  # the worker looks at the log and finds nothing
        crash(durable)
        engine.dispose()
        send_until_it_works(outbox, "2")
        for n in range(3, 40):
            send_until_it_works(outbox, str(n))
        assert eventually(lambda: len(handler.messages) >= 39)
    finally:
        relay.stop()
        thread.join(60)

    assert texts(handler.messages) == [str(n) for n in range(1, 40)]


def send_until_it_works(outbox: Outbox, body: str) -> None:
    """As an application does whose connections were cut."""
    for _ in range(50):
        try:
            send(outbox, body)
        except OperationalError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the database does not come back")
