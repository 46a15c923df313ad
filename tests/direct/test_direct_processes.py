"""Direct send and the life of a process: what is committed is sent before its end, and by whoever committed it."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.direct import delivery
from outbox.errors import SubscriptionError
from tests.support.destination import Destination, relay_to
from tests.support.direct import declare_compensation
from tests.support.directly import marked, relayed, writing_directly
from tests.support.nats_streams import Stream
from tests.support.programs import Program
from tests.support.servers.proxy import TcpProxy
from tests.support.waiting import eventually


def program(engine: Engine, path: Path | str, way: str, *arguments: str, stdout: IO[Any] | None = None) -> Program:
    url = engine.url.render_as_string(hide_password=False)
    return Program(["-m", "tests.support.direct_program", url, str(path), way, *arguments], stdout=stdout)


def arrived(path: Path) -> list[str]:
    return [line.split()[1] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.storm
@pytest.mark.parametrize(
    ("way", "code", "bodies"),
    [
        ("returns", 0, ["1", "2"]),
        ("exits", 3, ["1", "2"]),
        ("raises", 1, ["1", "2"]),
        ("forks", 0, ["child", "parent", "parent-again"]),
        ("is_a_process_of_multiprocessing", 0, ["child"]),
    ],
)
def test_a_program_that_ends_has_sent_what_it_committed(engine, tmp_path, way, code, bodies):
    """Nothing waits for the grace, and nothing is sent by two."""
    path = tmp_path / "arrived"

    assert program(engine, path, way).wait(280) == code
    assert sorted(arrived(path)) == bodies
    assert sorted(map(bytes.decode, marked(engine))) == bodies
    by_process = {line.split()[1]: line.split()[0] for line in path.read_text().splitlines()}
    if way == "forks":
        assert by_process["parent"] == by_process["parent-again"] != by_process["child"]


@pytest.mark.storm
def test_what_a_thread_commits_after_the_end_of_the_main_thread_comes_once(engine, tmp_path):
    """Direct sends have ended by then; they may have begun anew."""
    path = tmp_path / "arrived"

    assert program(engine, path, "leaves_a_thread").wait(280) == 0
    assert sorted(map(bytes.decode, marked(engine))) == sorted(sent := arrived(path))
    assert sorted([*sent, *map(bytes.decode, relayed(engine, "file"))]) == ["1", "2"]


@pytest.mark.storm
def test_a_program_whose_sender_hangs_ends_nevertheless(engine, tmp_path):
    """It waits for five seconds and then leaves the message to the relay."""
    with (tmp_path / "said").open("w+") as said:
        code = program(engine, tmp_path / "arrived", "hangs", stdout=said).wait(280)
        ended = time.time()
        said.seek(0)
        took = ended - float(said.readline())

    assert code == 0
    assert 4 < took < 200  # the end of an interpreter takes its time on a busy machine


@pytest.mark.storm
def test_a_sender_that_has_not_connected_yet_may_do_so_at_the_end(pg_engine, nats):
    """With an event loop, and threads that look up a host's name."""
    with TcpProxy("127.0.0.1", nats.port) as proxy:
        stream = Stream(nats, proxy)

        assert program(pg_engine, stream.url.replace("127.0.0.1", "localhost"), "returns").wait(280) == 0
        assert [message.body for message in stream.stored()] == [b"1", b"2"]
        stream.close()
    assert marked(pg_engine) == [b"1", b"2"]


@pytest.mark.storm
def test_a_program_that_ends_before_direct_sends_have_begun_leaves_all_to_the_relay(engine, tmp_path):
    """At once, not after a grace."""
    assert program(engine, tmp_path / "arrived", "is_short").wait(280) == 0

    assert (marked(engine), relayed(engine, "file")) == ([], [b"1", b"2"])


@pytest.mark.every_database
@pytest.mark.smoke("a program starts, and is gone after its commit")
def test_a_program_that_is_gone_leaves_the_rest_to_the_relay(engine, tmp_path):
    path = tmp_path / "arrived"

    assert program(engine, path, "is_gone").wait(280) == 4
    assert {*arrived(path), *map(bytes.decode, relayed(engine, "file"))} == {"1", "2"}


@pytest.mark.storm
def test_what_a_program_leaves_behind_that_is_gone_comes_after_the_grace(engine, tmp_path):
    """The compensation sends it by itself; also what the program had sent, if that was not acknowledged any more."""
    path = tmp_path / "arrived"
    destination = Destination()
    destination.destination = "file"
    relay = relay_to(destination, Outbox(engine))
    relay.start()

    assert program(engine, path, "is_gone").wait(280) == 4
    complete = eventually(lambda: {*destination.bodies, *map(str.encode, arrived(path))} == {b"1", b"2"}, 240)
    relay.stop()
    relay.join(60)

    assert complete
    assert len(destination.bodies) == len({*destination.bodies})
    assert len(arrived(path)) == len({*arrived(path)})


@pytest.mark.every_database
@pytest.mark.parametrize(
    ("deadline", "grace", "right"), [(None, 10, 4), (5, 10, 4), (1.5, 10, 7.5), (5.5, 10.5, 4), (30, 35, 4)]
)
def test_a_call_that_begins_at_the_last_moment_is_over_before_the_grace_is(engine, deadline, grace, right):
    """However long it takes, and with its ack: what a writer still sends, no compensation sends beside it."""
    destination = Destination()
    if deadline is not None:
        destination.deadline = timedelta(seconds=deadline)
    with writing_directly(engine, destination, patient=False) as outbox:
        assert (stored_grace(engine), right_of(outbox)) == (timedelta(seconds=grace), right)

    assert right + (deadline or 5) + delivery.FLUSH_SECONDS <= grace


def right_of(outbox: Outbox) -> float:
    assert outbox._direct is not None
    assert outbox._direct._dispatcher is not None
    return outbox._direct._dispatcher._delivery.right


def stored_grace(engine: Engine) -> timedelta:
    with engine.connect() as connection:
        statement = text("SELECT grace_ms FROM outbox_subscription WHERE name = 'relay:compensation'")
        return timedelta(milliseconds=connection.execute(statement).scalar_one())


@pytest.mark.storm
def test_a_grace_by_which_writers_send_only_grows(engine):
    """They read of another one after a while, and the compensation would send beside them at once."""
    declare_compensation(engine, timedelta(seconds=10))
    admin = Outbox(engine).admin

    advised = "stop the relay; the next writer makes it anew after: outbox subscriptions drop relay:compensation"
    with pytest.raises(SubscriptionError, match=advised):
        admin.alter("relay:compensation", grace=timedelta(seconds=9.9))
    refused = stored_grace(engine)
    admin.alter("relay:compensation", grace=timedelta(seconds=35))

    assert (refused, stored_grace(engine)) == (timedelta(seconds=10), timedelta(seconds=35))


@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.full), 8])
def test_without_failures_nothing_is_sent_twice(engine, tmp_path, processes, full, monkeypatch):
    """Two threads in each process, and two relays; in the end another relay looks for what nobody has sent.

    Grace, lease and the wait for SQLite's write lock are so long that a busy machine causes no failure.
    """
    monkeypatch.setattr("outbox.store.dialects.sqlite.channel.BUSY_SECONDS", 600.0)
    path, each = tmp_path / "arrived", 400 if full else 25
    destination = Destination()
    destination.destination = "file"
    declare_compensation(engine, timedelta(minutes=10))
    relays = [relay_to(destination, Outbox(engine)) for _ in range(2)]
    for relay in relays:
        relay.start()
    programs = [program(engine, path, "writes", str(each)) for _ in range(processes)]

    codes = [each.wait(600) for each in programs]
    for relay in relays:
        relay.stop()
        relay.join(120)
    left = relayed(engine, "file")

    sent = [*map(bytes.decode, [*destination.bodies, *left]), *arrived(path)]
    assert codes == [0] * processes
    assert len(sent) == len(set(sent)) == processes * 2 * each
    assert len(arrived(path)) >= len(sent) / 2, "direct sends have hardly been used"
