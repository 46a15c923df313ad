"""The demo keeps the promise, says so truly, and leaves nothing behind."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from outbox import Message
from outbox.cli import main
from outbox.cli.demo import _wait_for_ctrl_c, play
from outbox.cli.demo.destination import LinesFile, Stream
from outbox.cli.demo.judge import Receipt
from outbox.senders.nats import NatsSender
from outbox.testing.servers import NatsServer
from tests.support.command_line import the_tests_own_process
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


class Demo:
    """A demo in a process of its own; it and all that it starts carry a mark."""

    def __init__(self, *options: str, **environment: str) -> None:
        self._mark = f"MARK_{uuid.uuid4().hex}"
        command = "import sys; from outbox.cli import main; sys.argv[0] = 'outbox'; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", command, "demo", *options],
            env=os.environ | environment | {self._mark: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""

    def until(self, text: str) -> str:
        """Read on until a line holds this; that line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if text in line:
                return line
        raise AssertionError(f"it ended before it said {text!r}:\n{self.said}")

    def finish(self) -> int:
        """Read to the end; its exit code."""
        assert self.process.stdout is not None
        self.said += self.process.stdout.read()
        return self.process.wait(60)

    def picture(self) -> str:
        """The picture of the run, which is deleted."""
        return taken(self.said)

    def processes(self) -> list[psutil.Process]:
        """All that carry the mark."""
        return [process for process in psutil.process_iter() if self._mark in environment_of(process)]

    def results(self) -> dict[str, int]:
        """The numbers of the table."""
        rows = re.findall(r"^(\w[\w ]*?)  +([\d,]+)  ", self.said, re.MULTILINE)
        return {name: int(number.replace(",", "")) for name, number in rows}


def taken(said: str) -> str:
    """Return the picture that a demo has named, and delete the file."""
    (path,) = re.findall(r"^The run as a picture: (.*)$", said, re.MULTILINE)
    text = Path(path).read_text()
    Path(path).unlink()
    return text


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else dict(process.environ())
    except psutil.Error:
        return {}


@pytest.fixture
def run() -> Iterator[Callable[..., Demo]]:
    """Start demos that end with the test."""
    started: list[Demo] = []

    def start(*options: str, **environment: str) -> Demo:
        started.append(Demo(*options, **environment))
        return started[-1]

    yield start
    for demo in started:
        demo.process.kill()
        demo.process.wait()


def test_on_private_servers_everything_arrives_in_spite_of_the_kills(run, full, postgres, nats):
    orders = 2000 if full else 300
    demo = run("--orders", str(orders))

    assert demo.finish() == 0, demo.said
    results = demo.results()
    assert results == {
        "orders committed": orders,
        "messages committed": 3 * orders,
        "messages received": 3 * orders + results["duplicates"],
        "lost": 0,
        "phantom": 0,
        "duplicates": results["duplicates"],
        "order violations": 0,
        "messages per second": results["messages per second"],
    }
    told = ["PostgreSQL", "NATS", "relay 1 sends", "relay 1 is killed", "shop 1 is killed", "relay 2 has taken over"]
    assert [text for text in told if text not in demo.said] == []
    events = re.findall(r">(\w+ \d [\w ]+)</text>", demo.picture())
    assert sorted(events) == ["relay 1 is killed", "relay 1 sends", "relay 2 has taken over", "shop 1 is killed"]
    assert demo.processes() == []


def test_where_there_is_no_postgresql_sqlite_takes_its_place(run, nats):
    demo = run("--orders", "60", OUTBOX_TEST_PG_BIN="/nowhere")

    assert demo.finish() == 0, demo.said
    assert "going on with SQLite" in demo.said
    assert "NATS JetStream, a private one" in demo.said
    assert demo.results()["messages committed"] == 180
    assert demo.picture().count("<polyline") == 2


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, 130, marks=pytest.mark.full),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_nothing_survives_a_demo_that_is_interrupted(run, postgres, nats, number, code):
    """Not even when it has no time to clean up."""
    demo = run("--orders", "20000")
    demo.until("relay 1 sends")
    before = len(demo.processes())

    demo.process.send_signal(number)

    assert demo.finish() == code, demo.said
    assert before > 8  # itself, four shops, two relays, two servers with their own
    assert eventually(lambda: demo.processes() == [])


def test_nothing_survives_a_demo_that_fails(run, postgres, nats):
    demo = run("--orders", "2000")
    demo.until("relay 1 sends")
    relays = [process for process in demo.processes() if "relay" in process.cmdline()]

    for relay in relays:
        relay.kill()

    assert demo.finish() == 1
    # Both relays were killed, and the demo notices one of them first.
    assert re.search(r"Error: relay [12] ended with -9", demo.said)
    assert eventually(lambda: demo.processes() == [])


def test_a_demo_that_is_kept_can_be_played_with(run):
    """What it says to type works, and what comes of it is shown."""
    demo = run("--light", "--keep", "--orders", "8")
    url = demo.until("export OUTBOX_DATABASE=").partition("=")[2].strip()
    script = demo.until("orders.py ann 42").split()[1]
    demo.until("until Ctrl-C")

    subprocess.run([sys.executable, script, "ann", "42"], env=os.environ | {"OUTBOX_DATABASE": url}, check=True)
    demo.until("order-9: change 1 arrived")
    demo.process.send_signal(signal.SIGINT)

    assert demo.finish() == 0
    assert eventually(lambda: demo.processes() == [])
    assert not Path(url.removeprefix("sqlite:///")).exists()


def test_ctrl_c_while_messages_are_received_ends_it(nats, monkeypatch):
    """A client that takes a cancellation for a timeout must not swallow it."""

    async def patient(stream):
        asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGINT)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(5)
        return []

    monkeypatch.setattr(Stream, "_read_on", patient)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with closing(Stream(nats.url)) as stream, pytest.raises(KeyboardInterrupt):
            stream.receive()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_consumer_that_nothing_came_for_gets_what_comes_later():
    """The server forgets one that is not durable after five seconds."""
    with NatsServer() as server, closing(Stream(server.url)) as stream, closing(NatsSender(server.url)) as sender:
        stream.receive()
        time.sleep(8)
        sender.send([Message("orders", {"version": 1}, key="order-1")])

        assert [(receipt.key, receipt.version) for receipt in stream.receive()] == [("order-1", 1)]


def test_a_consumer_that_fails_ends_nothing_that_is_kept(monkeypatch, capsys):
    """It is told once, and whoever plays on sees what comes when it is well again."""

    def arrived():
        step = next(steps)
        if isinstance(step, BaseException):
            raise step
        return step

    steps = iter([OSError("away"), OSError("away"), [Receipt("order-1", 1, "id-1")], KeyboardInterrupt()])
    monkeypatch.setattr("outbox.cli.demo.time.sleep", lambda _seconds: None)
    site: Any = SimpleNamespace(database_url="sqlite://", destination=SimpleNamespace(url="nats://h"))
    arrivals: Any = SimpleNamespace(arrived=arrived)

    show: Any = SimpleNamespace(tell=print)

    _wait_for_ctrl_c(site, arrivals, show)

    assert capsys.readouterr().out.splitlines()[-2:] == [
        "what arrives cannot be shown, trying again: OSError: away",
        "order-1: change 1 arrived, message id-1",
    ]


def test_a_lost_message_is_told_and_is_a_failure(monkeypatch):
    """A destination that swallows one."""
    receive = LinesFile.receive
    lost = Receipt("order-2", 3, "")
    monkeypatch.setattr(
        LinesFile,
        "receive",
        lambda self: [each for each in receive(self) if (each.key, each.version) != (lost.key, lost.version)],
    )
    monkeypatch.setattr(play, "_PATIENCE_SECONDS", 20.0)  # a takeover takes longer than a lease

    with the_tests_own_process():
        ended = CliRunner().invoke(main, ["demo", "--light", "--orders", "8"])

    assert ended.exit_code == 1, ended.output
    assert re.search(r"^lost +1 ", ended.output, re.MULTILINE)
    assert "THE PROMISE IS BROKEN" in ended.output
    assert "</svg>" in taken(ended.output)


def test_relay_2_has_something_to_send_however_late_relay_1_is_killed(monkeypatch):
    """The play looks so seldom that the shops are done with all that they may do, and relay 1 as well."""
    monkeypatch.setattr(play, "_TICK_SECONDS", 4.0)

    with the_tests_own_process():
        ended = CliRunner().invoke(main, ["demo", "--light", "--orders", "8"])

    assert ended.exit_code == 0, ended.output
    events = re.findall(r">(\w+ \d [\w ]+)</text>", taken(ended.output))
    assert events == ["relay 1 sends", "relay 1 is killed", "shop 1 is killed", "relay 2 has taken over"]
