"""`outbox relay`: says where it begins, sends, stops when asked, and does not wait for ever when it should end."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from datetime import timedelta
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from outbox import Outbox
from outbox.model.lease import Partition
from outbox.store.subscriptions.leases import Leases
from tests.support.command_line import outbox
from tests.support.deadlines import patience_ends_with_a_refusal
from tests.support.nats_streams import Stream
from tests.support.servers.proxy import TcpProxy
from tests.support.waiting import eventually

#: The fields of a status that are different a moment later.
CHANGING = {"at": None, "log": None, "subscriptions": None}
PROGRAM = [sys.executable, "-c", "from outbox.cli import main; main()"]


def send(engine, *bodies, topic="orders"):
    with (sender := Outbox(engine)).begin() as session:
        for body in bodies:
            sender.send(session, topic, body)


def bodies(path) -> list[str]:
    return [json.loads(line)["body"] for line in path.read_text().splitlines()] if path.exists() else []


def standing(engine):
    """How `relay` stands."""
    return next(each for each in outbox(engine, "status", "--json").json["subscriptions"] if each["name"] == "relay")


@pytest.fixture
def stream(nats):
    """A stream of this test."""
    with TcpProxy("127.0.0.1", nats.port) as proxy, closing(Stream(nats, proxy)) as stream:
        yield stream


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


def test_until_empty_sends_everything_and_ends(engine, tmp_path):
    out = tmp_path / "out"
    send(engine, *(str(n) for n in range(25)))

    ended = outbox(engine, "relay", "--to", f"file://{out}", "--until-empty")

    assert (ended.code, bodies(out)) == (0, [str(n) for n in range(25)])
    assert ended.err == f"relay: all topics to file://{out}, from the earliest message on\nrelay: 25 sent\n"


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
    ended = outbox(sqlite_engine, "relay", "--to", f"file://{tmp_path / 'out'}", "--from", "LATEST", "--until-empty")

    assert "from the earliest message on; --from latest is for a name that is not there yet" in ended.err


@pytest.mark.parametrize("other", [["--topics", "mail"], ["--to", "file:///elsewhere"], ["--on-dead", "continue"]])
def test_another_declaration_under_the_same_name_is_refused(sqlite_engine, tmp_path, other):
    to = ["--to", f"file://{tmp_path / 'out'}"]
    outbox(sqlite_engine, "relay", *to, "--until-empty")

    ended = outbox(sqlite_engine, "relay", *to, *other, "--until-empty")

    advice = f"outbox subscriptions alter relay {' '.join(other)}\n"
    assert (ended.code, ended.err.startswith("Error: subscription 'relay' has "), ended.err.endswith(advice)) == (
        2,
        True,
        True,
    )


def test_an_unavailable_destination_ends_a_run_that_should_end_by_itself(engine):
    """Nothing is counted against the messages: the next run finds them all."""
    send(engine, "1", "2", "3")

    with patience_ends_with_a_refusal():
        ended = outbox(engine, "relay", "--to", "nats://localhost:1", "--until-empty", "--give-up-after", "1h")
    status = outbox(engine, "status", "--json").json["subscriptions"][0]

    assert (ended.code, "gave up after 1 h in which nats://localhost:1 accepted nothing" in ended.err) == (4, True)
    assert (status["backlog"], set(status["parked"].values())) == (3, {0})


@pytest.mark.storm
@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_messages_that_wait_for_a_destination_that_accepted_nothing_are_no_end(engine):
    """Two topics: neither can tell of the other, so both are parked after growing pauses. The text says why."""
    send(engine, "1")
    send(engine, "2", topic="mail")
    relay = ["relay", "--to", "nats://localhost:1", "--until-empty", "--give-up-after"]

    ended = [outbox(engine, *relay, patience) for patience in ("25s", "10s")]
    status = outbox(engine, "status", "--json").json["subscriptions"][0]

    assert [(each.code, "nats://localhost:1 accepted nothing (NATS: " in each.err) for each in ended] == [(4, True)] * 2
    assert ended[1].err.endswith("; parked: 2 waiting\n")
    assert (status["parked"]["waiting"], status["parked"]["dead"]) == (2, 0)


@pytest.mark.storm
def test_a_destination_that_comes_back_in_time_is_waited_for(sqlite_engine, stream):
    """What was parked while there was no stream is sent before the command gives up."""
    stream.take("other")
    send(sqlite_engine, "1", topic="late.a")
    send(sqlite_engine, "2", topic="late.b")
    with running(sqlite_engine, "--to", stream.url, "--until-empty", "--give-up-after", "1m") as process:
        waiting = eventually(lambda: standing(sqlite_engine)["parked"]["waiting"] == 2)
        stream.take("late.*")
        code = process.wait(60)
        said = process.stderr.read() if process.stderr else ""

    assert (waiting, code, said.splitlines()[-1]) == (True, 0, "relay: 2 sent")


@pytest.mark.storm
def test_a_second_relay_says_that_it_stands_by_and_that_it_takes_over(engine, tmp_path):
    out = tmp_path / "out"
    with running(engine, "--to", f"file://{out}") as first:
        assert eventually(lambda: outbox(engine, "status", "--json").json["subscriptions"][0]["live"])
        with running(engine, "--to", f"file://{out}") as second:
            assert second.stderr is not None
            said = [second.stderr.readline() for _ in range(2)]
            first.terminate()
            said.append(second.stderr.readline())

    assert [line.partition(" info    ")[2] for line in said[1:]] == [
        "relay: another worker holds the lease; standing by\n",
        "relay: the lease is free; taking over\n",
    ]


@pytest.mark.every_database
def test_a_topic_that_is_not_accepted_is_named_in_the_log_with_the_destinations_text(engine, stream):
    """Once, however many messages."""
    stream.take("there")
    send(engine, *"123", topic="missing")
    send(engine, "4", topic="there")
    send(engine, "5", "6", topic="no..subject")

    ended = outbox(engine, "relay", "--to", stream.url, "--until-empty")

    about = " does not accept topic "
    logged = [line.partition(" warning ")[2] for line in ended.err.splitlines() if about in line]
    text = f"no JetStream stream takes subject '{stream.prefix}.missing'; create one"
    assert (ended.code, len(logged)) == (0, 2)
    assert f"relay: {stream.url} does not accept topic missing, its messages wait: {text}" in logged
    narrow = f"relay: {stream.url} does not accept topic no..subject, its messages wait: NATS has no subject"
    assert [line.startswith(narrow) for line in sorted(logged)] == [False, True]


def test_a_lease_that_never_comes_ends_a_run_that_should_end_by_itself(engine, tmp_path):
    with closing(Outbox(engine).database.open()) as channel:
        assert Leases(channel).acquire(Partition("relay"), "somebody", timedelta(minutes=5))

    ended = outbox(engine, "relay", "--to", f"file://{tmp_path / 'out'}", "--until-empty", "--give-up-after", "1s")

    assert (ended.code, "worker somebody holds the lease of relay" in ended.err) == (4, True)


def test_what_was_parked_is_told_at_the_end(sqlite_engine, tmp_path):
    with (sender := Outbox(sqlite_engine)).begin() as session:
        sender.send(session, "orders", b"later", delay=timedelta(hours=1))

    ended = outbox(sqlite_engine, "relay", "--to", f"file://{tmp_path / 'out'}", "--until-empty")

    assert (ended.code, ended.err.splitlines()[-1]) == (0, "relay: 0 sent; parked: 1 delayed")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.storm)])
def test_a_signal_lets_it_finish_and_give_the_lease_back(engine, tmp_path, number):
    out = tmp_path / "out"
    with running(engine, "--to", f"file://{out}") as process:
        send(engine, "1", "2")
        assert eventually(lambda: bodies(out) == ["1", "2"])

        process.send_signal(number)
        code = process.wait(60)
        said = process.stderr.read() if process.stderr else ""

    (status,) = outbox(engine, "status", "--json").json["subscriptions"]
    assert (code, said.splitlines()[-1], status["live"], status["lease_until"]) == (
        0,
        "relay: stopped; 2 sent",
        False,
        None,
    )


def test_probes_are_answered_while_it_works(sqlite_engine, tmp_path):
    out, heartbeat = tmp_path / "out", tmp_path / "heartbeat"
    send(sqlite_engine, "1", "2")
    options = ("--to", f"file://{out}", "--http", "127.0.0.1:0", "--heartbeat-file", str(heartbeat))
    with running(sqlite_engine, *options) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[0]

        def ask(path):
            try:
                with urlopen(f"{url}{path}", timeout=60) as answer:
                    return answer.status, answer.read().decode()
            except HTTPError as error:
                return error.code, error.read().decode()

        assert eventually(lambda: ask("/readyz") == (200, "ok\n"))
        assert eventually(lambda: bodies(out) == ["1", "2"])
        sent = 'messaging_operation_name="send",messaging_system="file",subscription="relay"} 2.0'
        assert eventually(lambda: sent in ask("/metrics")[1])
        assert (ask("/livez"), heartbeat.exists()) == ((200, "ok\n"), True)
        code, status = ask("/status")
        printed = outbox(sqlite_engine, "status", "--json").json
        assert (code, json.loads(status) | CHANGING) == (200, printed | CHANGING)

        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("option", [("--http", "127.0.0.1:0"), ("--heartbeat-file", "beat")])
def test_a_run_that_ends_by_itself_has_no_probes(sqlite_engine, option):
    ended = outbox(sqlite_engine, "relay", "--to", "stdout:", "--until-empty", *option)

    assert (ended.code, ended.err.splitlines()[-1]) == (
        2,
        f"Error: {option[0]} and --until-empty exclude each other: nobody watches a short run",
    )


def test_a_heartbeat_file_in_no_folder_is_refused_with_the_fix(sqlite_engine, tmp_path):
    file = tmp_path / "run" / "alive"

    ended = outbox(sqlite_engine, "relay", "--to", "stdout:", "--heartbeat-file", str(file))

    fix = "make the folder, and let the user of this process write there"
    assert (ended.code, ended.err.splitlines()[-1]) == (
        2,
        f"Error: --heartbeat-file {file}: No such file or directory; {fix}",
    )


@pytest.mark.storm
def test_a_signal_ends_a_run_that_cannot_end(engine):
    send(engine, "1")
    with running(engine, "--to", "nats://localhost:1", "--until-empty", "--give-up-after", "1h") as process:
        assert eventually(lambda: outbox(engine, "status", "--json").json["subscriptions"][0]["live"])

        process.send_signal(signal.SIGTERM)
        process.wait(60)

    assert outbox(engine, "status", "--json").json["subscriptions"][0]["lease_until"] is None


def test_logs_are_lines_of_json_when_asked_for(sqlite_engine, tmp_path):
    ended = outbox(
        sqlite_engine, "relay", "--to", f"file://{tmp_path / 'out'}", "--until-empty", "-v", "--log-format", "json"
    )

    logged = [json.loads(line) for line in ended.err.splitlines()]
    (begun,) = [each for each in logged if each["event"] == "begins"]
    told = [each["message"] for each in logged if (each["level"], each["event"]) == ("info", "other")]
    assert told[-1] == "relay: 0 sent"
    assert (begun["level"], begun["message"], begun["subscription"]) == (
        "info", "subscription relay begins at earliest", "relay",
    )  # fmt: skip


def test_a_line_of_json_tells_an_error_as_such():
    ended = outbox("sqlite:///nowhere.db", "status", "--log-format", "json")

    (line,) = [json.loads(each) for each in ended.err.splitlines()]
    assert (ended.code, line["level"], line["message"][:20]) == (3, "error", "there is no file now")
