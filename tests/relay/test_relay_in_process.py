"""A relay in a thread of the application: begun, ended, and nobody's burden when the process forks."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from outbox import Message, Outbox, Relay, migrate
from outbox.schema import metadata
from outbox.telemetry.events import LeaseLost
from outbox.worker.settings import Settings
from tests.support import command_line
from tests.support.deadlines import overdue_when_hanging
from tests.support.destination import Destination, briskly, fill
from tests.support.guests import allow, owner_and_guest
from tests.support.leases import notice
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]


_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def threads_of_others():
    """Other tests of this process may have left threads that wait for a call."""
    _others.clear()
    _others.update(threading.enumerate())


def relay_threads() -> list[str]:
    """The threads of ours that this test began; two live as long as their process."""
    ours = (t.name for t in threading.enumerate() if t not in _others and t.name.startswith("outbox-"))
    return sorted(name for name in ours if name not in {"outbox-hints", "outbox-watch"})


def send(outbox: Outbox, *bodies: bytes) -> None:
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", body) for body in bodies])


def yielding(message: Message) -> Iterator[None]:
    """A function that does nothing when it is called."""
    yield


class Endless:
    """A sender that cannot be closed."""

    def send(self, messages: Sequence[Message]) -> None:
        """Never called."""


@pytest.mark.parametrize(
    ("destination", "told"),
    [
        (None, "not NoneType"),
        (7, "not int"),
        (Destination, r"pass Destination\(\)"),
        (yielding, "yielding is a generator; .*without yield"),
        (yielding(Message("t", b"")), "not generator"),
        (Endless(), r"close\(\).* not Endless"),
    ],
    ids=["nothing", "number", "class", "generator", "begun", "without close"],
)
def test_what_is_no_destination_is_refused(sqlite_engine, destination, told):
    outbox = Outbox(sqlite_engine)
    with pytest.raises(TypeError, match=told):
        Relay(outbox, destination)
    if destination is not None:
        with pytest.raises(TypeError, match=told):
            Outbox(sqlite_engine, sender=destination)


def test_a_relay_that_is_dropped_leaves_nothing_open(sqlite_engine):
    code = """
import sys
from outbox import Outbox, Relay, create_engine
engine = create_engine(sys.argv[1])
Relay(Outbox(engine), print).until_empty()
Relay(Outbox(engine), print)
engine.dispose()
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code, str(sqlite_engine.url)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")


def test_relays_that_several_threads_start_are_all_stopped(sqlite_engine):
    outbox, destination = Outbox(sqlite_engine), Destination()
    for _ in range(20):
        threads = [threading.Thread(target=outbox.start, args=(destination,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        outbox.stop()

    assert eventually(lambda: relay_threads() == [])


def test_a_relay_runs_in_a_thread_while_its_block_lasts(engine):
    outbox, destination = Outbox(engine), Destination()
    with Relay(outbox, destination) as relay:
        send(outbox, b"1")
        assert eventually(lambda: len(destination.messages) == 1)

    assert (destination.bodies, relay.name) == ([b"1"], "relay")
    # A thread of the handler ends by itself, a moment after it was told to.
    assert eventually(lambda: not relay_threads()), relay_threads()


def test_messages_arrive_while_it_runs_and_not_after(engine):
    outbox, destination = Outbox(engine), Destination()
    with outbox.running(destination):
        send(outbox, b"1", b"2")
        assert eventually(lambda: len(destination.messages) == 2)
    send(outbox, b"3")
    assert eventually(lambda: not relay_threads()), relay_threads()
    before, later = destination.bodies, Destination()
    Relay(outbox, later).until_empty()

    assert (before, later.bodies) == ([b"1", b"2"], [b"3"])


def test_a_commit_wakes_it_long_before_its_next_poll(engine):
    outbox, destination = Outbox(engine), Destination()
    rarely = timedelta(hours=1)
    with outbox.running(destination, settings=Settings(poll=(rarely, rarely))):
        send(outbox, b"first")
        arrived = [eventually(lambda: len(destination.messages) == 1)]
        for n in range(10):
            send(outbox, str(n).encode())
            arrived.append(eventually(lambda: len(destination.messages) == n + 2))  # noqa: B023 - asked at once

    assert arrived == [True] * 11


def test_what_the_application_raises_stops_it_too(pg_engine):
    outbox = Outbox(pg_engine)

    with pytest.raises(KeyError), outbox.running(Destination()):
        raise KeyError

    assert eventually(lambda: not relay_threads()), relay_threads()


def test_started_again_it_goes_to_the_new_destination_alone(pg_engine):
    """The same subscription, so the same name of a destination; another object."""
    outbox, first, second = Outbox(pg_engine), Destination(), Destination()
    outbox.start(first)
    send(outbox, b"1")
    eventually(lambda: len(first.messages) == 1)

    outbox.start(second)
    send(outbox, b"2")
    eventually(lambda: len(second.messages) == 1)
    outbox.stop()
    outbox.stop()

    assert (first.bodies, second.bodies) == ([b"1"], [b"2"])
    assert eventually(lambda: not relay_threads()), relay_threads()


@pytest.mark.every_database
def test_what_passes_by_itself_ends_no_relay(engine, caplog):
    """The tables come later than the relay; the application goes on, and the log says what is missing."""
    outbox, destination = Outbox(engine), Destination()
    metadata(dialect=engine.dialect.name).drop_all(engine)
    with outbox.running(destination):
        assert eventually(lambda: "outbox db upgrade --database " in caplog.text)
        migrate.upgrade(engine)
        send(outbox, b"1")
        arrived = eventually(lambda: destination.bodies == [b"1"])

    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert arrived
    assert len(errors) == 1, "the same trouble is said once a minute"


def test_a_privilege_that_is_missing_for_a_while_ends_no_relay(pg_engine, caplog):
    """`outbox status` says why nobody works."""
    with owner_and_guest(pg_engine) as (owner, guest):
        allow(owner, "ALL")
        outbox, destination = Outbox(guest), Destination()
        with outbox.running(destination):
            send(outbox, b"1")
            assert eventually(lambda: destination.bodies == [b"1"])
            allow(owner, "SELECT", table="outbox_progress")
            send(outbox, b"2")
            assert eventually(lambda: "permission denied" in notice(owner))
            shown = command_line.outbox(owner, "status")
            allow(owner, "ALL")
            arrived = eventually(lambda: set(destination.bodies) == {b"1", b"2"})
            withdrawn = eventually(lambda: not notice(owner))
    assert (arrived, withdrawn) == (True, True)
    assert "warning: relay: the worker does not get on" in shown.err
    assert ": settling fails, and nothing is sent until it works again:" in shown.err
    assert "permission denied for table outbox_progress" in shown.err + shown.out
    assert "permission denied" in caplog.text


@pytest.mark.every_database
@pytest.mark.smoke("a relay pauses twice before it works again")
def test_calls_that_never_come_back_do_not_pile_up_threads(engine):
    """Each hung call costs a thread that nobody can end, so there are only so many. Others are accepted meanwhile."""
    outbox, destination = Outbox(engine), Destination()
    over, leases = threading.Event(), list[LeaseLost]()
    destination.hanging = lambda messages: not over.is_set() and any(int(message.body) % 2 for message in messages)
    fill(outbox, 100, keys=100)
    outbox.listen(lambda event: leases.append(event) if isinstance(event, LeaseLost) else None)

    with outbox.running(overdue_when_hanging(destination), settings=briskly()):
        # It has given up, and again when it was started anew.
        assert eventually(lambda: len(leases) == 2)
        threads = relay_threads().count("outbox-handler")
        over.set()
        drained = eventually(lambda: len(destination.bodies) == 100)

    assert threads == 8
    assert drained
    assert sorted(map(int, destination.bodies)) == list(range(100)), "what a call has is not sent beside it"
