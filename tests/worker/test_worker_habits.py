"""A worker's habits: how often it looks, writes and tidies up when nobody sends, and what it does for its turn."""

import os
import select
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, create_engine
from outbox.model.lease import Partition
from outbox.model.message import uuid7
from outbox.model.position import Position
from outbox.store.database import Database
from outbox.store.dialects.sqlite.channel import SqliteChannel
from outbox.store.dialects.sqlite.locking import begin_immediate
from outbox.store.log.log import Log
from outbox.store.operations.check import tables_of
from outbox.store.subscriptions.progress import ProgressLog
from outbox.worker import partition, upkeep
from outbox.worker.polling import Polling
from outbox.worker.settings import Settings
from outbox.worker.waiting import Wait
from tests.support.readers import Collector, at_work, send, worker
from tests.support.waiting import eventually

#: Seconds: exact in binary, so that they can be compared.
SHORTEST, LONGEST = 0.015625, 0.0625
BRISK = Settings(poll=(timedelta(seconds=SHORTEST), timedelta(seconds=LONGEST)))
NEVER = 1e9


@pytest.fixture
def pruning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old progress is deleted often, and none is stored without messages."""
    monkeypatch.setattr(upkeep, "PRUNE_PROGRESS", 0.05)
    monkeypatch.setattr(upkeep, "STORE_IDLE", NEVER)


# Progress


def ages(engine: Engine) -> list[tuple[int, int, int]]:
    """Epoch, number and age in hours of each progress row, the newest last."""
    hours = Database(engine).seconds(since="settled_at")
    question = f"SELECT epoch, n, {hours} / 3600 FROM outbox_progress ORDER BY epoch, n"
    with engine.connect() as connection:
        return [(epoch, n, round(age)) for epoch, n, age in connection.execute(text(question))]


def age(engine: Engine, hours: list[int]) -> None:
    """Let the progress rows be so old, the newest last."""
    database = Database(engine)
    then = database.later("-3600 * :hours")
    update = database.sql("UPDATE {progress} SET settled_at = " + then + " WHERE epoch = :epoch AND n = :n")
    rows = zip(ages(engine), hours, strict=True)
    with closing(database.open()) as channel, channel.transaction():
        for (epoch, n, _), old in rows:
            channel.run(update, epoch=epoch, n=n, hours=old)


@pytest.mark.usefixtures("pruning")
def test_progress_goes_after_a_day_but_never_the_newest(engine):
    """Where the partition stands is in the newest row alone, however long ago that was written."""
    outbox, handler = Outbox(engine), Collector()
    with at_work(worker(outbox.database, handler, settings=BRISK)):
        for number in range(1, 4):
            send(outbox, str(number))
            # The first row of an owner is where it found the partition.
            assert eventually(lambda: ages(engine)[-1] == (1, number + 1, 0))  # noqa: B023 - asked at once
        age(engine, [90, 90, 25, 23, 48])
        gone = eventually(lambda: len(ages(engine)) < 5)

    assert gone
    assert ages(engine) == [(1, 3, 23), (1, 4, 48)]


def test_a_worker_that_ends_when_all_is_handled_deletes_old_progress(engine):
    """It may be started each minute, and never live for the ten minutes after which a worker that stays does so."""
    outbox = Outbox(engine)
    send(outbox, "1")
    worker(outbox.database, Collector()).until_empty()
    age(engine, [25] * len(ages(engine)))

    worker(outbox.database, Collector()).until_empty()

    # Where the owner has found the partition, and that it ended in order.
    assert ages(engine) == [(2, 1, 0), (2, 2, 0)]


@pytest.mark.usefixtures("pruning")
def test_a_silent_owner_prunes_nothing_that_counts(engine):
    """A day of silence, a restart, and another day: the only row is old."""
    outbox = Outbox(engine)
    send(outbox, "1")
    worker(outbox.database, Collector()).until_empty()
    age(engine, [25] * len(ages(engine)))
    with at_work(worker(outbox.database, Collector(), settings=BRISK)):
        assert eventually(lambda: ages(engine) == [(2, 1, 0)])
        age(engine, [25])
        time.sleep(0.5)
        silent = ages(engine)

    assert silent == [(2, 1, 25)]


def in_another_topic(outbox: Outbox) -> None:
    with outbox.begin() as session:
        outbox.send(session, "elsewhere", "1")


def taken_back(outbox: Outbox) -> None:
    """A transaction that moves the position on, and leaves nothing in the log."""
    with outbox.engine.begin() as connection:
        outbox.send(connection, "orders", "1")
        connection.execute(text("DELETE FROM outbox_message"))


@pytest.mark.parametrize(
    ("meanwhile", "passed", "idle"),
    [
        (in_another_topic, 0.1, NEVER),
        (taken_back, NEVER, 0.1),
    ],
    ids=["rows of other topics", "no rows at all"],
)
def test_a_silent_topic_pins_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Outbox], None], passed: float, idle: float
) -> None:
    """What has passed by is not read again by the next owner, and may be purged."""
    monkeypatch.setattr(upkeep, "STORE_PASSED", passed)
    monkeypatch.setattr(upkeep, "STORE_IDLE", idle)
    outbox, handler = Outbox(engine), Collector()

    def position() -> Position:
        with closing(outbox.database.open()) as channel:
            return Log().now(channel).position

    def stored() -> Position:
        with closing(outbox.database.open()) as channel:
            newest = ProgressLog(channel).newest(Partition("relay"))
        assert newest is not None
        return newest.progress.base

    with at_work(worker(outbox.database, handler, settings=BRISK, topics=("orders",))):
        send(outbox, "first")
        assert eventually(lambda: bool(handler.messages))
        meanwhile(outbox)
        last = position().head - 1
        moved_on = eventually(lambda: stored().sees(last))

    assert moved_on
    assert handler.bodies == [b"first"]


# Pauses


class Script:
    """Keeps the pauses between the looks of a worker, and does not wait for their end.

    `events` happen in the pause of their number; one that returns True is something that the worker hears.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, events: dict[int, Callable[[], bool]]) -> None:
        self.events = events
        self.pauses: list[float] = []
        pause = Polling.pause

        def paused(polling: Polling) -> float:
            self.pauses.append(pause(polling))
            return 60.0 if self.events.get(len(self.pauses), lambda: False)() else 0.0

        monkeypatch.setattr(Polling, "pause", paused)


def test_pauses_grow_while_nothing_comes_and_begin_again_when_something_does(engine, monkeypatch):
    """An idle log costs little, a busy one waits for little."""
    outbox, handler = Outbox(engine), Collector()
    patient = worker(outbox.database, handler, settings=BRISK)
    log = tables_of(outbox.database).message

    def sent_unheard() -> bool:
        with engine.begin() as connection:
            connection.execute(log.insert().values(topic="orders", slot=0, message_id=uuid7(), body=b"1"))
        return False

    def heard() -> bool:
        patient.hint()
        return True

    def stopped() -> bool:
        patient.stop()
        return False

    script = Script(monkeypatch, {4: sent_unheard, 8: heard, 11: stopped})
    patient.run()

    growing = [SHORTEST, 2 * SHORTEST, LONGEST, LONGEST]
    assert script.pauses == [*growing, *growing, *growing[:3]]
    assert handler.bodies == [b"1"]


@pytest.mark.parametrize(("number", "growing"), [(500, False), (1, True)], ids=["many", "one"])
def test_after_many_messages_the_pauses_stay_short(engine, monkeypatch, number, growing):
    """More are likely; their writers may be so busy that they tell of many at a time."""
    monkeypatch.setattr("outbox.worker.polling._AVERAGED", 1)
    monkeypatch.setattr("outbox.worker.polling._UNHINTED", 1)
    outbox, handler = Outbox(engine), Collector()
    eager = worker(outbox.database, handler, settings=BRISK)
    log = tables_of(outbox.database).message

    def sent_unheard() -> bool:
        with engine.begin() as connection:
            rows = [{"topic": "orders", "slot": 0, "message_id": uuid7(), "body": b"1"} for _ in range(number)]
            connection.execute(log.insert(), rows)
        return False

    def stopped() -> bool:
        eager.stop()
        return False

    script = Script(monkeypatch, {1: sent_unheard, 4: stopped})
    eager.run()

    before, *after = script.pauses
    assert before == SHORTEST
    assert (after == [SHORTEST, 2 * SHORTEST, LONGEST]) == growing
    assert growing or max(after) < SHORTEST
    assert len(handler.bodies) == number


def test_a_hint_is_followed_by_one_look(pg_engine, monkeypatch):
    """A notification that stays unread would cause a second look."""
    outbox = Outbox(pg_engine)
    #: Of each look, after how many pauses it came.
    looks: list[int] = []
    script = Script(monkeypatch, {})
    idle = worker(outbox.database, Collector(), settings=BRISK)
    step = partition.PartitionWorker.step

    def counted(self: partition.PartitionWorker, *, postpone: bool) -> Generator[Wait, None, int]:
        looks.append(len(script.pauses))
        return (yield from step(self, postpone=postpone))

    def hinted() -> bool:
        (turn,) = idle._subscriptions[0].turns.values()
        assert isinstance(turn._work, partition.PartitionWorker)
        descriptor = turn._work._settlement._channel.fileno
        assert descriptor is not None
        with closing(outbox.database.open()) as channel:
            channel.notify()
        # Until the notification has arrived on the connection of the worker.
        return eventually(lambda: bool(select.select([descriptor], [], [], 0.1)[0]))

    def stopped() -> bool:
        idle.stop()
        return False

    monkeypatch.setattr(partition.PartitionWorker, "step", counted)
    script.events = {1: hinted, 2: stopped}
    idle.run()

    assert looks.count(1) == 1


# Turns


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_s_worker_does_not_pass_for_its_parent_s():
    """By its owner's name it would take the lease that the parent still holds."""
    forked = worker(Outbox(create_engine("sqlite:///never-opened")).database, Collector())
    before = forked.owner
    reading, writing = os.pipe()

    child = os.fork()
    if child == 0:
        try:
            os.write(writing, f"{forked.owner} {forked.owner}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    first, second = os.read(reading, 1000).decode().split()
    os.close(reading)
    os.close(writing)

    assert first == second != before
    assert forked.owner == before


def test_sqlite_s_own_pauses_are_out_of_the_way(sqlite_engine):
    """On a connection as a worker has it: it would wait for a second before the first of ours."""
    pauses: list[float] = []
    holder, waiter = (SqliteChannel(sqlite_engine, "") for _ in range(2))

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 50:
            holder._driver.execute("COMMIT")

    with closing(holder), closing(waiter):
        holder._driver.execute("BEGIN IMMEDIATE")
        begin_immediate(waiter._driver.execute, seconds=20, pause=pause)
        assert waiter.rows("PRAGMA busy_timeout", {}) == [(1000,)]
    assert len(pauses) == 50


def test_who_waits_for_the_write_lock_asks_again_within_two_milliseconds(sqlite_engine):
    """SQLite's own pauses grow to 100 ms, and who comes new to the lock takes it in between."""
    pauses: list[float] = []
    file = str(sqlite_engine.url.database)
    with (
        closing(sqlite3.connect(file, timeout=0, isolation_level=None)) as holder,
        closing(sqlite3.connect(file, timeout=0, isolation_level=None)) as waiter,
    ):

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 30:
                holder.execute("COMMIT")

        holder.execute("BEGIN IMMEDIATE")
        begin_immediate(waiter.execute, pause=pause)

        assert waiter.in_transaction
    assert len(pauses) == 30
    assert 0.0003 <= min(pauses) < max(pauses) <= 0.002


def test_what_went_wrong_with_the_write_lock_is_told(sqlite_engine):
    """Not that a connection which somebody else has closed in the meantime takes no setting."""
    with (
        closing(sqlite3.connect(str(sqlite_engine.url.database), timeout=0, isolation_level=None)) as holder,
        closing(sqlite3.connect(str(sqlite_engine.url.database), timeout=0, isolation_level=None)) as waiter,
    ):

        def pause(_seconds: float) -> None:
            waiter.close()
            raise KeyboardInterrupt

        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(KeyboardInterrupt):
            begin_immediate(waiter.execute, pause=pause)
