"""A relay as a process: drained by a signal, taken over after a kill, silent in a fork, and small."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from outbox import Outbox, Unavailable
from outbox.model.parking import Parking
from outbox.model.verdict import DONE
from outbox.store.subscriptions.parked import Parked
from tests.support import probe
from tests.support.destination import Destination, briskly, fill, relay_to
from tests.support.parked import by_id, states
from tests.support.programs import ROOT, Program
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

PROGRAM = """
import sys, time
from datetime import timedelta
from outbox import Done, Outbox, Relay, create_engine
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings

class Slow:
    destination = "test"
    def send(self, messages):
        with open(sys.argv[2], "a") as file:
            for message in messages:
                time.sleep(float(sys.argv[3]))
                file.write(message.body.decode() + chr(10))
                file.flush()
        return [Done()] * len(messages)
    def close(self): pass

settings = Settings(limits=Limits(rows=50), lease=timedelta(seconds=2), renew_every=timedelta(milliseconds=300))
Relay(Outbox(create_engine(sys.argv[1])), Slow(), settings=settings).run()
"""


def start(url: str, path: Path, pause: float = 0.01) -> Program:
    return Program(["-c", PROGRAM, url, str(path), str(pause)])


def url_of(engine) -> str:
    return str(engine.url.render_as_string(hide_password=False))


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_signal_drains_and_nothing_is_sent_twice(engine, tmp_path):
    """What is under way is finished and settled, the lease is given back, the exit is clean."""
    fill(Outbox(engine), 300)
    path = tmp_path / "arrived"
    first = start(url_of(engine), path)
    assert eventually(lambda: len(lines(path)) > 20)

    first.send_signal(signal.SIGTERM)
    code = first.wait(120)
    with engine.connect() as connection:
        lease = connection.execute(text("SELECT owner, lease_until FROM outbox_lease")).one()
    second = start(url_of(engine), path, pause=0)
    assert eventually(lambda: len(lines(path)) >= 300)
    second.send_signal(signal.SIGINT)

    assert (code, second.wait(120)) == (0, 0)
    assert tuple(lease) == (None, None)
    assert lines(path) == [str(n) for n in range(300)]


def test_a_second_signal_ends_at_once(pg_engine, tmp_path):
    fill(Outbox(pg_engine), 5)
    path = tmp_path / "arrived"
    process = start(url_of(pg_engine), path, pause=4)
    eventually(lambda: process.poll() is not None, 2)

    def asked_again() -> bool:
        # Two signals of a kind are one for a process that stands still.
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        return process.poll() is not None

    assert eventually(asked_again)
    assert process.wait(120) == -signal.SIGTERM


def test_another_relay_takes_over_after_a_kill(engine, tmp_path):
    fill(Outbox(engine), 300)
    path = tmp_path / "arrived"
    first, second = start(url_of(engine), path), None
    assert eventually(lambda: len(lines(path)) > 20)
    second = start(url_of(engine), path, pause=0)

    first.kill()
    first.wait()
    complete = eventually(lambda: len(set(lines(path))) == 300)
    second.terminate()
    second.wait(120)

    first_arrivals = [int(line) for line in dict.fromkeys(lines(path))]
    assert complete
    assert [n for key in range(20) for n in first_arrivals if n % 20 == key] == [
        n for key in range(20) for n in range(key, 300, 20)
    ]
    assert len(lines(path)) <= 300 + 50


def test_a_stop_during_an_outage_repeats_nothing(pg_engine):
    """Half of the batch is accepted, then the destination goes away, then the worker is stopped."""
    outbox, destination = Outbox(pg_engine), Destination()
    fill(outbox, 100)

    destination.answer = lambda message: DONE if int(message.body) < 60 else Unavailable("gone")
    relay = relay_to(destination, outbox)
    relay.start()
    eventually(lambda: len(destination.messages) == 60)
    before = time.monotonic()
    relay.stop()
    relay.join(120)
    took = time.monotonic() - before
    destination.answer = lambda _message: DONE

    relay_to(destination, outbox).until_empty()

    assert took < 60
    assert sorted(map(int, destination.bodies)) == list(range(100))
    assert states(pg_engine) == {}


def test_the_lease_is_renewed_while_a_handler_works(pg_engine):
    """One call takes longer than the lease, and nobody takes over."""
    outbox, destination = Outbox(pg_engine), Destination()
    began, over = threading.Event(), threading.Event()

    def hanging(_messages):
        began.set()
        return not over.is_set()

    def lease() -> tuple[int, int]:
        with pg_engine.connect() as connection:
            epoch, renewals = connection.execute(text("SELECT epoch, renewals FROM outbox_lease")).one()
        return epoch, renewals

    destination.hanging = hanging
    fill(outbox, 1)
    settings = briskly(lease=timedelta(seconds=3))
    holder = relay_to(destination, outbox, deadline=timedelta(minutes=3), settings=settings)
    other = relay_to(Destination(), outbox, settings=settings)

    holder.start()
    assert began.wait(60)
    other.start()
    # With half a second between renewals, that takes longer than the lease of three.
    renewed = eventually(lambda: lease()[1] >= 10)
    over.set()
    arrived = eventually(lambda: len(destination.messages) == 1)
    epoch, _ = lease()
    for relay in (holder, other):
        relay.stop()
        relay.join(60)

    assert (renewed, arrived) == (True, True)
    assert destination.bodies == [b"0"]
    assert epoch == 1


@pytest.mark.alone
@pytest.mark.parametrize("count", [pytest.param(100_000, id="many")])
def test_many_small_messages_need_little_memory(pg_engine, tmp_path, full, count):
    count = 1_000_000 if full else count
    with pg_engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outbox_message (message_id, topic, key, slot, body) SELECT gen_random_uuid(), 'orders',"
                " 'k' || n % 1000, 1, convert_to(repeat('x', 300), 'UTF8') FROM generate_series(1, :n) AS n"
            ),
            {"n": count},
        )

    assert peak_of_draining(url_of(pg_engine), count) <= 150


@pytest.mark.alone
def test_large_bodies_need_a_bounded_memory(pg_engine, full):
    count = 200 if full else 40
    with pg_engine.begin() as connection:
        for _ in range(count):
            connection.execute(
                text(
                    "INSERT INTO outbox_message (message_id, topic, slot, body)"
                    " VALUES (gen_random_uuid(), 'orders', 1, :body)"
                ),
                {"body": os.urandom(4 * 1024 * 1024)},
            )

    assert peak_of_draining(url_of(pg_engine), count) <= 250


@pytest.mark.alone
def test_large_bodies_that_were_parked_need_a_bounded_memory(engine, full):
    """All of them are due, as after an outage."""
    outbox, count = Outbox(engine), 200 if full else 80
    for _ in range(count):
        with outbox.begin() as session:
            outbox.send(session, "orders", bytes(4 * 1024 * 1024))
    with closing(outbox.database.open()) as channel:
        with channel.transaction():
            due = Parking(state="waiting", holds=True, delay=timedelta(0))
            Parked(channel, "relay").park(by_id({due: list(range(1, count + 1))}))
        probe.empty(channel)

    assert peak_of_draining(url_of(engine), count) <= 250


MEASURE = """
import sys
from outbox import Outbox, Relay, create_engine
from outbox.model.verdict import DONE

class Counting:
    count = 0
    def send(self, messages):
        Counting.count += len(messages)
        return [DONE] * len(messages)
    def close(self): pass

Relay(Outbox(create_engine(sys.argv[1])), Counting()).until_empty()
print(Counting.count, open("/proc/self/status").read())
"""


def peak_of_draining(url: str, count: int) -> float:
    """Peak memory of a relay that drains everything, in MB."""
    done = subprocess.run([sys.executable, "-c", MEASURE, url], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) == count
    found = re.search(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert found is not None
    return int(found[1]) / 1024


def test_a_fork_disturbs_nobody(pg_engine):
    """The child of a process with a running relay writes and ends; the parent's connections are not its business."""
    outbox, destination = Outbox(pg_engine), Destination()
    with outbox.running(destination):
        with outbox.begin() as session:
            outbox.send(session, "t", b"parent")
        assert eventually(lambda: len(destination.messages) == 1)

        child = os.fork()
        if child == 0:
            code = 1
            try:
                pg_engine.dispose(close=False)
                with outbox.begin() as session:
                    outbox.send(session, "t", b"child")
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        with outbox.begin() as session:
            outbox.send(session, "t", b"parent again")
        arrived = eventually(lambda: len(destination.messages) == 3)

    assert os.waitstatus_to_exitcode(status) == 0
    assert arrived
    assert destination.bodies == [b"parent", b"child", b"parent again"]
