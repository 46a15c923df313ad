"""A forked child has what is its own, and disturbs nobody; the parent's threads and connections are not in its way."""

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Engine

from outbox import Outbox
from outbox.store.database import Channel
from outbox.store.dialects.sqlite import channel as sqlite
from outbox.store.dialects.sqlite.channel import SqliteChannel
from tests.support.readers import bodies

pytestmark = pytest.mark.storm

ROOT = Path(__file__).parents[2]


def run(code: str, *arguments: str) -> tuple[list[str], str]:
    """What a program said, and what it complained about."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout.split(), done.stderr


FORKS = """
import logging, os, sys, time
from outbox import Done, Outbox, create_engine

logging.basicConfig(level=logging.WARNING)
outbox = Outbox(create_engine(sys.argv[1]))
bodies = []

def take(message):
    bodies.append(message.body.decode())

def send(body):
    with outbox.begin() as session:
        outbox.send(session, "t", body)

def wait(count):
    deadline = time.monotonic() + 20
    while len(bodies) < count and time.monotonic() < deadline:
        time.sleep(0.01)

with outbox.running(take):
    send("parent")
    wait(1)
    child = os.fork()
    if child == 0:
        outbox.engine.dispose(close=False)
        send("child")
        sys.exit(0)  # leaves the block, and lets the interpreter clean up whatever it finds
    _, status = os.waitpid(child, 0)
    wait(2)
    send("parent_again")
    wait(3)
    with outbox.engine.connect() as connection:
        epochs = connection.exec_driver_sql("SELECT epoch FROM outbox_lease").scalar_one()
print(status, epochs, *bodies, sep=",")
"""


def test_a_forked_child_that_ends_in_order_disturbs_nobody(engine):
    """Its copies of the parent's connections are not its to close: the parent keeps its lease, and logs nothing."""
    url = engine.url.render_as_string(hide_password=False)

    assert run(FORKS, url) == (["0,1,parent,child,parent_again"], "")


FORKS_OFTEN = """
import os, signal, sqlite3, sys, threading
from collections.abc import Iterator
from contextlib import closing, suppress
from outbox import Outbox, create_engine

database = Outbox(create_engine(sys.argv[1])).database
over = threading.Event()

def work():
    while not over.is_set():
        with closing(database.open()) as channel:
            for _ in range(20):
                channel.rows("SELECT count(*) FROM outbox_message")
                channel.run("UPDATE outbox_subscription SET name = name")

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
statuses = []
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        with closing(sqlite3.connect(database.engine.url.database)) as connection:
            connection.execute("SELECT count(*) FROM outbox_message").fetchall()
        os._exit(0)
    statuses.append(os.waitpid(child, 0)[1])
    if statuses[-1]:
        break
over.set()
for thread in threads:
    thread.join()
print(len(statuses), sum(statuses))
"""


@pytest.mark.alone
def test_a_child_that_was_forked_while_a_thread_of_ours_had_sqlite_at_work_has_its_own(sqlite_engine, full):
    """SQLite's locks in memory would be taken for ever there, and the child hang when it connects."""
    forks = 2000 if full else 150

    assert run(FORKS_OFTEN, str(sqlite_engine.url), str(forks)) == ([str(forks), "0"], "")


OUTLIVES = """
import os, sys
import outbox as library
import sqlalchemy
from sqlalchemy.pool import NullPool

made_by = {"ours": library.create_engine, "theirs": sqlalchemy.create_engine}[sys.argv[2]]
engine = made_by(sys.argv[1], poolclass=NullPool)
outbox = library.Outbox(engine)
arrived = []
outbox.start(arrived.append)

def send(connection, body):
    outbox.send(connection, "t", body)
    connection.commit()

with engine.connect() as connection:
    send(connection, "parent")
while not arrived:
    pass
(go_on, tell_parent), (wait, tell_child) = os.pipe(), os.pipe()
if os.fork() == 0:
    with engine.connect() as connection:
        send(connection, "child")
        os.write(tell_parent, b"!")
        os.read(wait, 1)
        send(connection, "child_alone")
        os._exit(0)
os.read(go_on, 1)
outbox.close()
os.write(tell_child, b"!")
_, status = os.wait()
print(status)
"""


@pytest.mark.parametrize("engine_of", ["ours", "theirs"])
def test_what_a_child_commits_after_its_parent_has_closed_the_file_stays(sqlite_engine, engine_of):
    """With the parent's connections open it would have no lock on the file, and lose the write-ahead log."""
    sqlite_engine.dispose()

    assert run(OUTLIVES, str(sqlite_engine.url), engine_of) == (["0"], "")
    assert bodies(sqlite_engine) == [b"parent", b"child", b"child_alone"]


def test_a_fork_does_not_wait_for_whoever_keeps_the_file_to_himself(tmp_path):
    """A thread of ours connects meanwhile, and would change the journal's mode."""
    file = tmp_path / "plain.db"
    outbox = Outbox(sqlalchemy.create_engine(f"sqlite:///{file}"))

    def connect() -> None:
        with suppress(sqlite3.OperationalError):
            outbox.database.open().close()

    with closing(sqlite3.connect(file, isolation_level=None)) as holder:
        holder.execute("CREATE TABLE t (n integer)")
        holder.execute("BEGIN EXCLUSIVE")
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        while sqlite._connecting.acquire(blocking=False):
            sqlite._connecting.release()
        before = time.monotonic()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        waited = time.monotonic() - before
        holder.execute("ROLLBACK")
    thread.join(60)

    assert not thread.is_alive()
    assert waited < 30


class Interrupted:
    """A lock at which Ctrl-C ends the waiting."""

    def acquire(self) -> bool:
        """Never ours."""
        raise KeyboardInterrupt


@pytest.fixture
def channels(sqlite_engine: Engine) -> Iterator[list[Any]]:
    """Connections of threads of ours."""
    opened = [SqliteChannel(sqlite_engine, "") for _ in range(3)]
    yield opened
    for channel in opened:
        channel.close()


def others_get_on(channels: list[Any], engine: Engine) -> bool:
    """Whether another thread can connect, and use every connection."""
    free: list[bool] = []

    def look() -> None:
        with closing(Outbox(engine).database.open()) as opened:
            others = (Channel(opened.database, each) for each in channels)
            free.extend(channel.rows("SELECT 1") == [(1,)] for channel in (opened, *others))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(60)
    return free == [True] * (1 + len(channels))


def test_a_fork_whose_waiting_is_interrupted_leaves_no_lock_behind(channels, sqlite_engine):
    lock, channels[1].lock = channels[1].lock, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        sqlite._before_fork()
    sqlite._after_fork()
    channels[1].lock = lock

    assert others_get_on(channels, sqlite_engine)


def test_a_fork_in_the_middle_of_another_one_leaves_no_lock_behind(channels, sqlite_engine):
    """A signal handler's."""
    sqlite._before_fork()
    sqlite._before_fork()
    sqlite._after_fork()
    sqlite._after_fork()

    assert others_get_on(channels, sqlite_engine)
