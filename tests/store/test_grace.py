"""Grace: a message is read so long after its commit, whenever its transaction began and whoever reads it."""

import random
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from outbox import create_engine, migrate
from outbox.model.lease import Partition
from outbox.model.position import Progress
from outbox.model.subscription import Declaration
from outbox.store.database import Channel, Database
from outbox.store.log.cursor import Cursor
from outbox.store.log.grace import Grace
from outbox.store.log.log import Limits, Log
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.testing.servers import PostgresServer
from outbox.worker.settings import Settings
from tests.conftest import started
from tests.support.readers import Worker, job, texts
from tests.support.rows import Timed, append, write
from tests.support.waiting import eventually

GRACE = timedelta(seconds=1)
BRISK = Settings(
    limits=Limits(rows=20),
    poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
    lease=timedelta(minutes=5),
    renew_every=timedelta(milliseconds=300),
)
TEN_SECONDS, HALF_A_SECOND = timedelta(seconds=10), timedelta(seconds=0.5)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


class Reads:
    """A cursor with a grace, and what it brought at which second."""

    def __init__(self, channel: Channel, limits: Limits | None = None) -> None:
        log = Log(limits or Limits())
        self.clock = Clock()
        grace = Grace(TEN_SECONDS, (HALF_A_SECOND, HALF_A_SECOND), self.clock)
        self.channel = channel
        self.cursor = Cursor(log, Progress(log.now(channel).position), grace)
        self.found: dict[float, list[str]] = {}

    def until(self, moment: float) -> None:
        """Read twice a second."""
        while self.clock.now < moment:
            while (batch := self.cursor.read(self.channel)).seen:
                self.found.setdefault(self.clock.now, []).extend(texts(batch.messages))
            self.clock.now += 0.5


def with_grace(database: Database, handler: Timed, grace: timedelta = GRACE) -> Worker:
    """A worker of a subscription that leaves rows alone for a while."""
    declared = Declaration(name="late", destination="callable:tests", grace=grace)
    return Worker(database, [job(declared, handler)], BRISK)


def at_work(database: Database) -> bool:
    """Whether a worker has the lease of that subscription."""
    with closing(database.open()) as channel:
        holder = Leases(channel).look(Partition("late"))
    return holder is not None and holder.live


def test_the_grace_counts_from_the_commit_not_from_the_insert(pg_engine):
    """Transactions commit in another order than they wrote, one after it was open for longer than the grace."""
    database = Database(pg_engine)
    with closing(database.open()) as channel, pg_engine.connect() as early, pg_engine.connect() as late:
        reads = Reads(channel)
        append(early, "drawn first")
        append(late, "drawn second")
        reads.until(2)
        write(pg_engine, "drawn third")
        reads.until(5)
        late.commit()
        reads.until(20)
        early.commit()
        write(pg_engine, "drawn last")
        reads.until(40)

    assert reads.found == {12: ["drawn third"], 15: ["drawn second"], 30: ["drawn first", "drawn last"]}


def test_every_position_ripens_for_itself(engine):
    """One grace after the other would make it two graces for whoever just missed the first."""
    database = Database(engine)
    with closing(database.open()) as channel:
        reads = Reads(channel)
        for second in range(1, 15):
            reads.until(second)
            write(engine, str(second))
        reads.until(40)

    assert reads.found == {second + 10: [str(second)] for second in range(1, 15)}


def test_a_window_of_many_pages_ends_where_it_was_ripe(engine):
    """What is committed while it is paged waits for its own grace."""
    database = Database(engine)
    with closing(database.open()) as channel:
        reads = Reads(channel, Limits(rows=10))
        reads.until(1)
        write(engine, *map(str, range(95)))
        reads.until(11)
        batch = reads.cursor.read(channel)
        write(engine, "young")
        reads.until(21)
        found = texts(batch.messages) + reads.found[11.0]
        reads.until(23)

    assert found == [str(n) for n in range(95)]
    assert {moment: bodies for moment, bodies in reads.found.items() if moment > 11} == {21.5: ["young"]}


def test_a_capture_counts_from_its_answer(engine, monkeypatch):
    """While it was on its way somebody may have committed: that, too, it may have seen."""
    database = Database(engine)
    with closing(database.open()) as channel:
        reads = Reads(channel)
        now = Log.now

        def slow(log, channel):
            write(engine, "committed meanwhile") if reads.clock.now == 0 else None
            capture = now(log, channel)
            reads.clock.now += 3 if reads.clock.now == 0 else 0
            return capture

        monkeypatch.setattr(Log, "now", slow)
        reads.until(20)

    assert reads.found == {13: ["committed meanwhile"]}


@pytest.mark.storm
def test_nothing_is_early_lost_twice_or_out_of_order_under_writers(engine):
    """Four writers, each with a key of its own, keep their transactions open for up to twice the grace."""
    grace, handler, database = timedelta(milliseconds=400), Timed(), Database(engine)
    committed: dict[bytes, float] = {}

    def busy(writer: int) -> None:
        chance = random.Random(writer)
        for n in range(12):
            with engine.connect() as connection:
                append(connection, f"{writer}-{n}", key=f"k{writer}")
                time.sleep(chance.choice((0, 0, 0.02, 0.8 if engine.dialect.name == "postgresql" else 0.05)))
                # From before: a moment later others may see it.
                committed[f"{writer}-{n}".encode()] = time.monotonic()
                connection.commit()

    writers = [threading.Thread(target=busy, args=(writer,)) for writer in range(4)]
    relay = with_grace(database, handler, grace)
    running = threading.Thread(target=relay.run)
    for thread in (running, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    arrived = eventually(lambda: len(handler.messages) >= 48)
    relay.stop()
    running.join()

    assert arrived
    for writer in range(4):
        of_writer = [message.body.decode() for message in handler.messages if message.key == f"k{writer}"]
        assert of_writer == [f"{writer}-{n}" for n in range(12)]
    waits = {body: handler.came_at[body] - committed[body] for body in committed}
    assert min(waits.values()) >= grace.total_seconds(), waits


@pytest.mark.storm
def test_the_next_owner_waits_for_the_grace_again(engine):
    """Its list of positions went with the lease."""
    database, first, second = Database(engine), Timed(), Timed()
    before, after = with_grace(database, first), with_grace(database, second)
    threads = [threading.Thread(target=each.run) for each in (before, after)]
    threads[0].start()
    eventually(lambda: at_work(database))
    write(engine, "1")
    time.sleep(0.6)
    before.stop()
    threads[0].join()
    took_over = time.monotonic()
    threads[1].start()
    arrived = eventually(lambda: bool(second.messages))
    after.stop()
    threads[1].join()

    assert arrived
    assert (first.bodies, second.bodies) == ([], [b"1"])
    assert second.came_at[b"1"] - took_over >= GRACE.total_seconds()


@pytest.fixture
def own_server(tmp_path: Path):
    with started(PostgresServer) as server:
        engine = create_engine(server.url())
        migrate.upgrade(engine)
        yield server, engine
        engine.dispose()


@pytest.mark.storm
def test_a_position_from_before_a_crash_ends_no_window(own_server):
    """The server that gave it is no more: the ids that it saw are given out again."""
    server, engine = own_server
    database, handler = Database(engine), Timed()
    relay = with_grace(database, handler)
    thread = threading.Thread(target=relay.run)
    thread.start()
    eventually(lambda: at_work(database))
    write(engine, "1")
    time.sleep(0.5)
    server.kill()
    crashed = time.monotonic()
    server.start()
    engine.dispose()
    write(engine, "2")
    arrived = eventually(lambda: len(handler.messages) == 2)
    relay.stop()
    thread.join()

    assert arrived
    assert handler.bodies == [b"1", b"2"]
    assert handler.came_at[b"1"] - crashed >= GRACE.total_seconds()


def test_until_empty_waits_for_what_was_committed_before(engine):
    database, handler = Database(engine), Timed()
    write(engine, "1", "2")
    began = time.monotonic()

    with_grace(database, handler).until_empty()

    assert handler.bodies == [b"1", b"2"]
    assert time.monotonic() - began >= GRACE.total_seconds()


def test_until_empty_waits_for_nothing_when_there_is_nothing(engine):
    database, handler = Database(engine), Timed()
    began = time.monotonic()

    with_grace(database, handler, timedelta(minutes=5)).until_empty()

    assert handler.bodies == []
    assert time.monotonic() - began < 60


@pytest.mark.storm
def test_an_idle_worker_sleeps(engine, monkeypatch):
    """It captures now and then, and looks for nothing in between."""
    database, statements = Database(engine), []
    relay = with_grace(database, Timed(), timedelta(minutes=1))
    for name in ("now", "extent", "page", "read_on"):
        ours = getattr(Log, name)

        def noted(*arguments, ours=ours, name=name):
            statements.append(name)
            return ours(*arguments)

        monkeypatch.setattr(Log, name, noted)
    thread = threading.Thread(target=relay.run)
    thread.start()
    eventually(lambda: at_work(database))
    time.sleep(0.5)
    statements.clear()
    time.sleep(2)
    asked = list(statements)
    relay.stop()
    thread.join()

    assert set(asked) == {"now"}
    assert len(asked) <= 40


def test_a_grace_belongs_to_the_subscription(engine):
    """A worker that says nothing finds it, one that counts on less is content, one that counts on more is refused."""
    database = Database(engine)

    def grace(declared: timedelta | None) -> timedelta:
        declaration = Declaration(name="late", destination="callable:tests", grace=declared)
        return Subscriptions(channel).declare(declaration).grace

    with closing(database.open()) as channel:
        assert [grace(each) for each in (GRACE, None, GRACE / 2)] == [GRACE, GRACE, GRACE]
        with pytest.raises(Exception, match=r"has grace 1 s, this worker asks for 2 s.*alter late --grace 2000ms"):
            grace(2 * GRACE)
