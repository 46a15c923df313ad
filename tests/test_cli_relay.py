"""`outbox relay`: says where it begins, sends, stops when asked, and does not wait for ever when it should end."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from datetime import timedelta

import pytest

from outbox import Outbox
from outbox.store.lease import Leases, Partition
from tests.command_line import outbox

PROGRAM = [sys.executable, "-c", "from outbox.cli import main; main()"]


def send(engine, *bodies, topic="orders"):
    with (sender := Outbox(engine)).begin() as session:
        for body in bodies:
            sender.send(session, topic, body)


def bodies(path) -> list[str]:
    return [json.loads(line)["body"] for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def running(engine, *arguments):
    """The relay as a process of its own."""
    environment = {**os.environ, "OUTBOX_DATABASE": engine.url.render_as_string(hide_password=False)}
    process = subprocess.Popen(
        [*PROGRAM, "relay", *arguments], env=environment, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def eventually(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_until_empty_sends_everything_and_ends(engine, tmp_path):
    out = tmp_path / "out"
    send(engine, *(str(n) for n in range(25)))

    ended = outbox(engine, "relay", "--to", f"file://{out}", "--until-empty", "--batch-size", "10")

    assert (ended.code, bodies(out)) == (0, [str(n) for n in range(25)])
    assert ended.err == f"relay: all topics to file://{out}, from the earliest message on\nrelay: 25 sent\n"


def test_once_sends_one_batch(sqlite_engine, tmp_path):
    out = tmp_path / "out"
    send(sqlite_engine, *(str(n) for n in range(25)))

    ended = outbox(sqlite_engine, "relay", "--to", f"file://{out}", "--once", "--batch-size", "10")

    assert (ended.code, len(bodies(out)) in range(1, 11)) == (0, True)


def test_only_the_topics_that_were_asked_for_are_sent(sqlite_engine, tmp_path):
    out = tmp_path / "out"
    send(sqlite_engine, "order")
    send(sqlite_engine, "mail", topic="mail")

    outbox(
        sqlite_engine, "relay", "--to", f"file://{out}", "--until-empty", "--topics", "mail, letters", "--name", "post"
    )

    assert bodies(out) == ["mail"]


@pytest.mark.parametrize(("start", "sent"), [("earliest", ["old", "new"]), ("latest", ["new"]), (None, ["old", "new"])])
def test_a_new_name_begins_where_it_is_told(sqlite_engine, tmp_path, start, sent):
    out = tmp_path / "out"
    options = [] if start is None else ["--from", start]
    send(sqlite_engine, "old")
    relay = ["relay", "--to", f"file://{out}", "--name", "n", *options, "--until-empty"]

    first = outbox(sqlite_engine, *relay)
    send(sqlite_engine, "new")
    second = outbox(sqlite_engine, *relay)

    assert bodies(out) == sent
    assert f"a new subscription that begins at {start or 'earliest'}" in first.err
    assert "going on where it was" in second.err


def test_a_start_that_cannot_count_any_more_is_told(sqlite_engine, tmp_path):
    """The first subscription is there since the tables are, at earliest."""
    ended = outbox(sqlite_engine, "relay", "--to", f"file://{tmp_path / 'out'}", "--from", "latest", "--until-empty")

    assert "from the earliest message on; --from latest is for a name that is not there yet" in ended.err


@pytest.mark.parametrize("other", [["--topics", "mail"], ["--to", "file:///elsewhere"], ["--on-dead", "continue"]])
def test_another_declaration_under_the_same_name_is_refused(sqlite_engine, tmp_path, other):
    to = ["--to", f"file://{tmp_path / 'out'}"]
    outbox(sqlite_engine, "relay", *to, "--until-empty")

    ended = outbox(sqlite_engine, "relay", *to, *other, "--until-empty")

    assert (ended.code, "outbox subscriptions alter relay" in ended.err) == (2, True)


def test_an_unavailable_destination_ends_a_run_that_should_end_by_itself(engine):
    """Nothing is counted against the messages: the next run finds them all."""
    send(engine, "1", "2", "3")

    ended = outbox(engine, "relay", "--to", "nats://localhost:1", "--until-empty", "--give-up-after", "1s")
    status = outbox(engine, "status", "--json").json["subscriptions"][0]

    assert (ended.code, "gave up after 1.0 s in which nats://localhost:1 accepted nothing" in ended.err) == (4, True)
    assert (status["backlog"], set(status["parked"].values())) == (3, {0})


def test_a_lease_that_never_comes_ends_a_run_that_should_end_by_itself(engine, tmp_path):
    with closing(Outbox(engine).database.open()) as channel:
        database = Outbox(engine).database
        assert Leases(database).acquire(channel, Partition("relay"), "somebody", timedelta(minutes=5))

    ended = outbox(engine, "relay", "--to", f"file://{tmp_path / 'out'}", "--until-empty", "--give-up-after", "1s")

    assert (ended.code, "worker somebody holds the lease of relay" in ended.err) == (4, True)


def test_what_was_set_aside_is_told_at_the_end(sqlite_engine, tmp_path):
    with (sender := Outbox(sqlite_engine)).begin() as session:
        sender.send(session, "orders", b"later", delay=timedelta(hours=1))

    ended = outbox(sqlite_engine, "relay", "--to", f"file://{tmp_path / 'out'}", "--until-empty")

    assert (ended.code, ended.err.splitlines()[-1]) == (0, "relay: 0 sent; set aside: 1 delayed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_it_finish_and_give_the_lease_back(engine, tmp_path, number):
    out = tmp_path / "out"
    with running(engine, "--to", f"file://{out}") as process:
        send(engine, "1", "2")
        assert eventually(lambda: bodies(out) == ["1", "2"])

        process.send_signal(number)
        code = process.wait(30)
        said = process.stderr.read() if process.stderr else ""

    (status,) = outbox(engine, "status", "--json").json["subscriptions"]
    assert (code, said.splitlines()[-1], status["live"], status["lease_until"]) == (
        0,
        "relay: stopped; 2 sent",
        False,
        None,
    )


def test_a_signal_ends_a_run_that_cannot_end(engine):
    send(engine, "1")
    with running(engine, "--to", "nats://localhost:1", "--until-empty", "--give-up-after", "1h") as process:
        assert eventually(lambda: outbox(engine, "status", "--json").json["subscriptions"][0]["live"])

        process.send_signal(signal.SIGTERM)
        process.wait(30)

    assert outbox(engine, "status", "--json").json["subscriptions"][0]["lease_until"] is None


def test_logs_are_lines_of_json_when_asked_for(sqlite_engine, tmp_path):
    ended = outbox(
        sqlite_engine, "relay", "--to", f"file://{tmp_path / 'out'}", "--until-empty", "-v", "--log-format", "json"
    )

    logged = [json.loads(line) for line in ended.err.splitlines() if line.startswith("{")]
    assert ("info", "subscription relay begins at earliest") in {(each["level"], each["message"]) for each in logged}
