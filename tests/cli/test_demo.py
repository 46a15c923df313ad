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
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import psutil
import pytest
from click.testing import CliRunner

from outbox import Message
from outbox.cli import main
from outbox.cli.demo import _wait_for_ctrl_c, play
from outbox.cli.demo.destination import LinesFile, Stream
from outbox.cli.demo.judge import Judgement, Receipt, judge
from outbox.cli.demo.picture import History, drawn
from outbox.cli.demo.site import Books, prepared
from outbox.cli.demo.staff import ProcessFailedError, Staff
from outbox.cli.demo.writer import Writer
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


@pytest.mark.storm
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


@pytest.mark.storm
def test_relay_2_has_something_to_send_however_late_relay_1_is_killed(monkeypatch):
    """The play looks so seldom that the shops are done with all that they may do, and relay 1 as well."""
    monkeypatch.setattr(play, "_TICK_SECONDS", 4.0)

    with the_tests_own_process():
        ended = CliRunner().invoke(main, ["demo", "--light", "--orders", "8"])

    assert ended.exit_code == 0, ended.output
    events = re.findall(r">(\w+ \d [\w ]+)</text>", taken(ended.output))
    assert events == ["relay 1 sends", "relay 1 is killed", "shop 1 is killed", "relay 2 has taken over"]


class Town:
    """A place where everything happens at once: shops place what they may, and a relay sends it.

    `idle`: a relay that sends nothing. `swallowed`: the message that the destination loses.
    """

    url, is_postgresql = "file:///town", False

    def __init__(self, *, idle: str = "", swallowed: str = "") -> None:
        self.destination = self.books = self
        self._idle, self._swallowed = idle, swallowed
        self._allowed: dict[str, int] = {}
        self._shares: dict[str, int] = {}
        self._relays: set[str] = set()
        self._sent: set[str] = set()

    def allow(self, shop: str, orders: int) -> None:
        """Raise the number of orders of a shop."""
        self._allowed[shop] = orders

    def writer(self, shop: str, share: int, _pause: float) -> Any:
        """Open a shop, which works until it may place its whole share."""
        self._shares[shop] = share
        return SimpleNamespace(
            kill=lambda: None, said=lambda: "", is_running=lambda: self._allowed[shop] < self._shares[shop]
        )

    def relay(self, name: str, _to: str, _lease: str) -> Any:
        """Start a relay."""
        self._relays.add(name)
        left = partial(self._relays.discard, name)
        return SimpleNamespace(name=name, kill=left, stop=left, is_running=lambda: True)

    def committed(self) -> dict[str, int]:
        """Return the three changes of each order."""
        return {f"{shop}, order {n}": 3 for shop, orders in self._allowed.items() for n in range(orders)}

    def changes(self) -> int:
        """Return the number of changes."""
        return sum(self.committed().values())

    def receive(self) -> list[Receipt]:
        """Return the receipts since the last call; none while no relay sends."""
        if not self._relays - {self._idle}:
            return []
        due = [key for key in self.committed() if key not in self._sent]
        self._sent.update(due)
        every = [Receipt(key, version, f"{key}: {version}") for key in due for version in (1, 2, 3)]
        return [one for one in every if one.message_id != self._swallowed]

    def tell(self, _text: str) -> None:
        """Do nothing: the history has the events, too."""

    def progress(self, *_numbers: int) -> None:
        """Do nothing."""


@pytest.fixture
def played(monkeypatch) -> Callable[..., tuple[Judgement, list[str]]]:
    """Perform a play in a town; return the judgement, and the events."""
    monkeypatch.setattr(play, "_TICK_SECONDS", 0.0)
    monkeypatch.setattr(play, "_PATIENCE_SECONDS", 0.0)

    def perform(orders: int, **faults: str) -> tuple[Judgement, list[str]]:
        town: Any = Town(**faults)
        performed = play.Play(town, town, town, orders)
        judgement = performed.perform(keep=False)
        return judgement, [event for _, event in performed.history.marks]

    return perform


@pytest.mark.parametrize("orders", [*range(4, 12), 2000])
def test_relay_2_has_something_to_send_although_relay_1_has_sent_everything(played, orders):
    """The shops wait for the play: some orders are placed only when relay 1 is gone."""
    judgement, events = played(orders)

    number = 3 * orders
    fine = {"lost": 0, "phantom": 0, "duplicates": 0, "violations": 0}
    assert judgement == Judgement(committed=number, received=number, **fine)
    assert events == ["relay 1 sends", "relay 1 is killed", "shop 1 is killed", "relay 2 has taken over"]


def test_a_takeover_that_never_comes_ends_the_demo_with_an_error(played):
    with pytest.raises(ProcessFailedError, match="relay 2 has sent nothing for 0 s"):
        played(8, idle="relay 2")


def test_a_message_that_the_destination_swallows_is_judged_lost(played):
    judgement, _ = played(8, swallowed="shop 2, order 1: 3")

    assert (judgement.lost, judgement.is_sound) == (1, False)


def test_a_shop_places_no_more_orders_than_it_may_by_now(tmp_path, monkeypatch):
    """The shop rests, and goes on when it may place more."""
    monkeypatch.chdir(tmp_path)
    url, staff = f"sqlite:///{tmp_path}/shop.db", Staff(tmp_path, {})
    service = prepared(url)
    seen: list[int] = []
    later = iter([2, 2, 5])

    def rest() -> None:
        seen.append(books.changes())
        staff.allow("shop 1", next(later))

    staff.allow("shop 1", 2)
    with closing(Books(url, service.Order)) as books:
        Writer(service, "shop 1", 5, 0.0, rest).run()
        seen.append(books.changes())
    service.engine.dispose()

    assert seen == [3 * 2, 3 * 2, 3 * 2, 3 * 5]


def history(*versions: int) -> list[Receipt]:
    return [Receipt("order-1", version, f"id-{version}") for version in versions]


def test_the_picture_shows_what_was_committed_and_received_and_when_what_happened():
    """Events in their order in time, one below the other."""
    history = History(samples=[(0.0, 0, 0), (1.0, 10, 5), (2.0, 20, 20)], marks=[(2.0, "it is over"), (1.0, "half")])

    picture = ET.fromstring(drawn(history))

    lines = [line.get("points") for line in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    words = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert lines == ["70.0,370.0 475.0,250.0 880.0,130.0", "70.0,370.0 475.0,310.0 880.0,130.0"]
    assert words[:5] == ["20", "0", "2 s", "half", "it is over"]
    assert history.first_with_more_received_than(5) == 2.0
    assert history.first_with_more_received_than(20) is None


def test_a_run_without_anything_has_a_picture():
    assert ET.fromstring(drawn(History())).tag.endswith("svg")


@pytest.mark.parametrize(
    ("receipts", "wrong"),
    [
        (history(1, 2, 3), {}),
        (history(1, 2, 3, 2, 3), {"duplicates": 2}),
        (history(1, 2), {"lost": 1}),
        (history(1, 3, 2), {"violations": 2}),
        (history(1, 3, 2, 3), {"violations": 2, "duplicates": 1}),
        (history(2, 3), {"violations": 1, "lost": 1}),
        (history(1, 2, 3, 4), {"phantom": 1}),
        ([*history(1, 2, 3), Receipt("order-1", 2, "another")], {"phantom": 1}),
        ([*history(1, 2, 3), Receipt("order-2", 1, "another")], {"phantom": 1}),
    ],
)
def test_the_judge_finds_what_is_wrong(receipts, wrong):
    """Of an order with three committed changes."""
    fine = {"lost": 0, "phantom": 0, "duplicates": 0, "violations": 0}

    judgement = judge({"order-1": 3}, receipts)

    assert judgement == Judgement(committed=3, received=len(receipts), **fine | wrong)
    assert judgement.is_sound == (set(wrong) <= {"duplicates"})
