"""A crash at every step of writer and relay: SIGKILL in a real process. What was committed arrives, nothing else."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from sqlalchemy import create_engine, text

from outbox import Message, Outbox, Relay, Retry, Verdict
from outbox import create_engine as create_outbox_engine
from outbox.model.verdict import DONE
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings
from tests.support.destination import LONG_LEASE
from tests.support.faults import arm_kill
from tests.support.leases import end_lease
from tests.support.programs import ROOT, run

BATCH, COUNT, KEYS = 50, 220, 7

WRITER = ["outbox.before_insert", "outbox.after_insert", "outbox.before_commit", "outbox.after_commit"]
RELAY = [
    "worker.before_fetch",
    "worker.after_fetch",
    "relay.before_send",
    "relay.after_send",
    "worker.before_settle",
    "worker.after_park",
    "worker.after_settle",
    "worker.in_parked",
    "worker.before_renew",
    "worker.after_renew",
]
#: In tests/rocketmq/test_kills.py.
TRANSACTIONS = [
    "half.after_prepare", "half.before_end", "half.after_end", "half.before_restore", "check.before_end",
    "check.in_end", "check.after_end",
]  # fmt: skip
#: In tests/rocketmq/test_simple_consumer.py.
POPS = ["pop.before_write", "pop.before_commit", "pop.after_commit"]
#: Of commands that borrow a worker's lease, in tests/worker/test_giving_back.py.
COMMANDS = ["command.after_ask", "command.before_alter", "command.after_alter"]
#: Of all that declare or change a subscription, in tests/store/test_taking_turns.py.
CHANGES = ["subscription.checked"]


#: What the quick tier has: a crash on each side of the commit, the hand-over and the settle. The rest is a storm.
QUICK = {
    ("outbox.before_commit", 1),
    ("outbox.after_commit", 1),
    ("relay.after_send", 1),
    ("worker.before_settle", 1),
    ("worker.after_park", 1),
    ("worker.after_settle", 3),
}


def crashes(points: Sequence[str], hits: Sequence[int]) -> list[ParameterSet]:
    """Return each point with each of its hits, and the tier that it belongs to."""
    kept = pytest.mark.smoke("a process dies and its lease runs out")
    return [
        pytest.param(point, hit, marks=kept if (point, hit) in QUICK else pytest.mark.storm)
        for point in points
        for hit in hits
    ]


class FileOf:
    """A destination that outlives its process: one line a message. The poison is refused for ever."""

    destination = "file of the test"

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, messages):
        """Append what is accepted; behind the poison nothing of its key."""
        verdicts: list[Verdict] = []
        stopped: set[str | None] = set()
        with self._path.open("a") as file:
            for message in messages:
                if message.body == b"3" or message.key in stopped:
                    stopped.add(message.key)
                    verdicts.append(Retry("poison", timedelta(milliseconds=10)))
                else:
                    file.write(f"{message.key} {message.body.decode()} {message.message_id}\n")
                    verdicts.append(DONE)
        return verdicts

    def close(self) -> None:
        """Every line is written already."""


def relay(url: str, path: Path) -> Relay:
    settings = Settings(limits=Limits(rows=BATCH), lease=LONG_LEASE, renew_every=timedelta(milliseconds=100))
    return Relay(Outbox(create_outbox_engine(url)), FileOf(path), settings=settings)


def write(url: str) -> None:
    """Orders, each with its message in the same transaction; every fifth changes its mind."""
    engine = create_outbox_engine(url)
    outbox = Outbox(engine)
    for number in range(COUNT):
        with outbox.begin() as session:
            session.execute(text("INSERT INTO truth (n) VALUES (:n)"), {"n": number})
            outbox.send(session, "orders", str(number), key=f"k{number % KEYS}")
            if number % 5 == 4:
                session.rollback()


def fill(url: str) -> None:
    """The same in a fifth of the time: ten orders in each transaction, of which every fifth is rolled back."""
    outbox = Outbox(create_outbox_engine(url))
    for first in range(0, COUNT, 10):
        with outbox.begin() as session:
            numbers = range(first, first + 10)
            session.execute(text("INSERT INTO truth (n) VALUES (:n)"), [{"n": number} for number in numbers])
            outbox.send_all(session, [Message("orders", str(n), key=f"k{n % KEYS}") for n in numbers])
            if first % 50 == 40:
                session.rollback()


def child(argument: str) -> None:
    """What a process of these tests does: write or relay, and die at the n-th time a point is reached."""
    task = json.loads(argument)
    arm_kill(task["point"], task["hit"])
    if task["role"] == "write":
        write(task["url"])
    else:
        running = relay(task["url"], Path(task["path"]))
        running.run()


def run_until_killed(role: str, point: str, hit: int, url: str, path: Path) -> int:
    task = json.dumps({"role": role, "point": point, "hit": hit, "url": url, "path": str(path)})
    program = "import sys; from tests.scenarios.crash.test_crash_points import child; child(sys.argv[1])"
    return run(["-c", program, task], timeout=240).returncode


def url_of(engine) -> str:
    return str(engine.url.render_as_string(hide_password=False))


def delivered(path: Path) -> dict[str, list[int]]:
    """The numbers that arrived, per key, in order."""
    by_key: dict[str, list[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        key, number, _ = line.split()
        by_key.setdefault(key, []).append(int(number))
    return by_key


def truth(engine) -> dict[str, list[int]]:
    """The numbers that were committed, per key; the poison and what stands behind it stays."""
    with create_engine(url_of(engine)).connect() as connection:
        numbers = [row[0] for row in connection.execute(text("SELECT n FROM truth ORDER BY n"))]
    by_key: dict[str, list[int]] = {}
    for number in numbers:
        by_key.setdefault(f"k{number % KEYS}", []).append(number)
    by_key.pop("k3", None)
    return by_key


def without_repeats(numbers: list[int]) -> list[int]:
    """First copies only, in order of arrival; strictly rising if nothing came before its turn."""
    return list(dict.fromkeys(numbers))


@pytest.fixture
def shop(engine):
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE truth (n integer PRIMARY KEY)"))
    return engine


def check(shop, path: Path, kills: int) -> None:
    end_lease(shop)
    relay(url_of(shop), path).until_empty()
    arrived = delivered(path)
    assert {key: without_repeats(numbers) for key, numbers in arrived.items()} == truth(shop)
    assert sum(map(len, arrived.values())) - sum(map(len, truth(shop).values())) <= kills * BATCH


@pytest.mark.parametrize(("point", "hit"), crashes(WRITER, [1, 90]))
def test_a_writer_that_dies_loses_and_invents_nothing(shop, tmp_path, point, hit):
    code = run_until_killed("write", point, hit, url_of(shop), tmp_path / "none")

    assert code == -signal.SIGKILL
    check(shop, tmp_path / "arrived", kills=0)


@pytest.mark.parametrize(("point", "hit"), crashes(RELAY, [1, 3]))
def test_a_relay_that_dies_repeats_a_batch_at_most(shop, tmp_path, point, hit):
    fill(url_of(shop))
    if point == "worker.after_park":
        hit = 1  # the poison is parked once; from then on it is changed

    code = run_until_killed("relay", point, hit, url_of(shop), tmp_path / "arrived")

    assert code == -signal.SIGKILL
    check(shop, tmp_path / "arrived", kills=1)


def test_the_list_of_crash_points_is_complete():
    """A new point belongs into the lists above."""
    called = re.compile(r'^\s+crash_point\("([a-z._]+)"\)', re.MULTILINE)
    files = [file for file in (ROOT / "outbox").rglob("*.py") if "testing" not in file.parts]
    found = {name for file in files for name in called.findall(file.read_text())}

    assert found == {*WRITER, *RELAY, *TRANSACTIONS, *POPS, *COMMANDS, *CHANGES}


def test_send_all_is_one_step(shop, tmp_path):
    """All of a statement or none of it."""
    outbox = Outbox(shop)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", str(n), key=f"k{n % 2}") for n in range(10)])
        session.rollback()

    relay(url_of(shop), tmp_path / "arrived").until_empty()

    assert delivered(tmp_path / "arrived") == {}
