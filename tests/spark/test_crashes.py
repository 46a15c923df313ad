"""Servers that are killed: ids that are given out again, reads that are broken off, standbys that lag behind."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, StandbyError, create_engine, migrate
from outbox.model.position import EARLIEST, Window
from outbox.spark.job import Extract, Extraction
from outbox.spark.manifest import Archive
from outbox.spark.place import Address, Place
from outbox.spark.planner import Planner
from outbox.store.log import stamp
from outbox.testing.servers import PostgresServer
from tests.conftest import started
from tests.spark.extracts import Here, ids_in, ids_of, run_here
from tests.spark.reading import bodies, place_of, read
from tests.spark.streams import Stream
from tests.spark.test_fetch import fill
from tests.support.command_line import outbox as command
from tests.support.servers.postgresql import Standby

pytestmark = pytest.mark.jvm

BURNT = 120
TRIES, TRIES_IN_FULL = 2, 5


def migrated(server: PostgresServer) -> Engine:
    """An outbox on a server of this test's own."""
    engine = create_engine(server.url())
    migrate.upgrade(engine)
    return engine


@pytest.fixture
def durable() -> Iterator[PostgresServer]:
    """A server with durable commits that leaves rollbacks in memory: its writer would flush them after 0.2 s."""
    with started(
        lambda: PostgresServer(durable=True, settings={"wal_writer_delay": "10s", "autovacuum": "off"})
    ) as server:
        yield server


def burn(server: PostgresServer) -> int:
    """Draw transaction ids and roll them back; returns the highest."""
    with psycopg.connect(server.url().replace("+psycopg", ""), autocommit=True) as connection:
        for _ in range(BURNT):
            with connection.transaction(force_rollback=True):
                row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("flushes", [True, False])
def test_a_position_from_before_a_crash_misses_nothing(durable, tmp_path, monkeypatch, flushes, full):
    """Neither that of a stream nor that of an archive. Ids that were rolled back and not on disk are drawn again: a
    position that had seen them passes over the new row.

    Without the wait for the disk this very run loses messages.
    """
    monkeypatch.setattr("outbox.spark.job.run", run_here)
    if not flushes:
        monkeypatch.setattr(stamp, "_wait", lambda *_: None)
    engine = migrated(durable)
    sent, came, again = [], [], 0

    def extract() -> None:
        wanted = Extraction(empty_after=timedelta(0))
        with closing(Extract(Archive(tmp_path), place_of(engine), wanted)) as job:
            job.step(Here())

    for n in range(TRIES_IN_FULL if full else TRIES):
        highest = burn(durable)
        stream = Stream(engine, startingPosition="latest")
        offset, _ = stream.next(stream.start())
        extract()
        durable.kill()
        engine.dispose()
        durable.start()
        with engine.begin() as connection:
            Outbox(engine).send(connection, "orders", str(n))
        sent.append(str(n).encode())
        with engine.connect() as connection:
            again += connection.scalar(text("SELECT max(xact_id) FROM outbox_message")) <= highest
        while burn(durable) <= highest:
            pass
        stream.begin()
        came += stream.next(offset)[1]
        stream.follower.close()
    extract()
    archived, wanted = ids_of(tmp_path), ids_in(engine)
    engine.dispose()

    assert (again == 0) is flushes
    assert (came == sent) is flushes
    assert (archived == wanted) is flushes


def test_the_database_is_killed_four_times_in_one_read(spark, full):
    """The whole server, while one task streams; the task goes on after the last row that came."""
    number = 1_000_000 if full else 150_000
    with started(PostgresServer) as server:
        engine = migrated(server)
        fill(engine, number, size=300)
        engine.dispose()
        reader = spark.read.format("outbox").option("url", server.url()).option("retries", 20)
        frame = reader.option("partitions", 1).load()
        killer = Killer(server)
        killer.start()

        rows = frame.selectExpr("count(*)", "count(distinct id)", "min(id)", "max(id)", "sum(length(body))").collect()
        killer.join()

    assert killer.kills == 4
    assert [tuple(row) for row in rows] == [(number, number, 1, number, 300 * number)]


class Killer(threading.Thread):
    """Kills a server four times, each time when it has more rows for a reader than the socket holds, and starts it."""

    def __init__(self, server: PostgresServer) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.kills = 0

    def run(self) -> None:
        """Kill, and bring it back."""
        deadline = time.monotonic() + 120
        while self.kills < 4 and time.monotonic() < deadline:
            if self._is_in_mid_read():
                self._server.kill()
                self._server.start()
                self.kills += 1

    def _is_in_mid_read(self) -> bool:
        statement = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'COPY%' AND wait_event = 'ClientWrite'"
        url = self._server.url().replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            for _ in range(200):
                if connection.execute(statement).fetchone() != (0,):
                    return True
                time.sleep(0.005)
        return False


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary and a standby that follows it."""
    with started(PostgresServer) as primary:
        migrated(primary).dispose()
        with Standby(primary) as standby:
            yield primary, standby


def test_a_standby_gives_rows_when_it_has_replayed_what_the_position_sees(pair):
    """Positions are the primary's; a standby that lags is waited for."""
    primary, standby = pair
    engine, copy = create_engine(primary.url()), create_engine(standby.url(), isolation_level="AUTOCOMMIT")
    place = Place(rows=Address(standby.url()), planner=Address(primary.url()))
    with copy.connect() as connection:
        connection.execute(text("SELECT pg_wal_replay_pause()"))
    with engine.begin() as connection:
        Outbox(engine).send(connection, "orders", "a")

    with closing(Planner(place)) as planner:
        tasks = planner.tasks(Window(EARLIEST, planner.now().position))
        found: list[bytes] = []
        reading = threading.Thread(target=lambda: found.extend(bodies(read(tasks))))
        reading.start()
        reading.join(1)
        assert reading.is_alive()
        with copy.connect() as connection:
            connection.execute(text("SELECT pg_wal_replay_resume()"))
        reading.join(60)

    assert found[-1:] == [b"a"]
    for each in (engine, copy):
        each.dispose()


def test_an_extract_reads_a_standby_and_tells_the_primary(pair, tmp_path, monkeypatch):
    """It waits for the standby, which shows that the messages come from there; what it registers is written."""
    monkeypatch.setattr("outbox.spark.job.run", run_here)
    monkeypatch.setattr("outbox.cli.spark.session", lambda **_: nullcontext(Here()))
    primary, standby = pair
    engine, copy = create_engine(primary.url()), create_engine(standby.url(), isolation_level="AUTOCOMMIT")
    resumed = threading.Event()

    def resume() -> None:
        resumed.set()
        with copy.connect() as connection:
            connection.execute(text("SELECT pg_wal_replay_resume()"))

    path, options = str(tmp_path / "archive"), ["--standby", standby.url(), "--register", "nightly"]
    assert command(engine, "extract", path, *options).code == 0
    with copy.connect() as connection:
        connection.execute(text("SELECT pg_wal_replay_pause()"))
    with engine.begin() as connection:
        Outbox(engine).send(connection, "orders", "a")
    timer = threading.Timer(1, resume)
    timer.start()

    ended = command(engine, "extract", path, *options)

    timer.join()
    assert (ended.code, resumed.is_set(), ids_of(tmp_path / "archive")) == (0, True, ids_in(engine))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM outbox_subscription WHERE name = 'nightly'")) == 1
    for each in (engine, copy):
        each.dispose()


def test_a_standby_alone_is_refused(pair):
    """Its snapshots miss open transactions, whose messages would be lost."""
    _, standby = pair

    with pytest.raises(StandbyError, match="set plannerUrl to the primary"):
        Planner(Place(rows=Address(standby.url()))).now()


def test_a_task_that_comes_to_a_standby_by_chance_is_refused(pair):
    """As by a URL of several hosts: it was planned on the primary, and knows not what the standby must have."""
    primary, standby = pair
    engine = create_engine(primary.url())
    with engine.begin() as connection:
        Outbox(engine).send(connection, "orders", "a")
    engine.dispose()
    with closing(Planner(Place(rows=Address(primary.url())))) as planner:
        (task,) = planner.tasks(Window(EARLIEST, planner.now().position))

    with pytest.raises(StandbyError, match="is a standby, which may not have all rows yet"):
        read([replace(task, place=Place(rows=Address(standby.url())))])
