"""Processes that write and relay, killed right after their commits: nothing is lost, and each key keeps its order."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox, Settings, Verdict, create_engine
from outbox.model.verdict import DONE
from tests.support.faults import arm_kill
from tests.support.programs import run
from tests.support.waiting import eventually

WRITERS, PARTITIONS, KEYS = 3, 4, 8
SETTINGS = Settings(lease=timedelta(seconds=5), renew_every=timedelta(milliseconds=500))
#: How long the broken twin keeps what it has answered for.
LATE_SECONDS = 0.05

#: The numbers of each key.
Numbers = dict[str, list[int]]


class File:
    """A destination that outlives its processes: one line a message."""

    destination = "file of the test"

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, messages: Sequence[Message]) -> list[Verdict]:
        """Append all of them."""
        lines = "".join(f"{message.key} {message.body.decode()}\n" for message in messages)
        with self._path.open("a") as file:
            file.write(lines)
        return [DONE] * len(messages)

    def close(self) -> None:
        """Every line is written already."""


class Hasty(File):
    """A twin that says that messages are stored, and stores them a moment later."""

    def send(self, messages: Sequence[Message]) -> list[Verdict]:
        """Append all of them soon."""
        threading.Timer(LATE_SECONDS, super().send, [messages]).start()
        return [DONE] * len(messages)


DESTINATIONS = {"right": File, "hasty": Hasty}


def write_and_relay(argument: str) -> None:
    """What a process does: it writes with a relay inside, and dies right after one of its commits, or in peace."""
    task = json.loads(argument)
    outbox, chance = Outbox(create_engine(task["url"])), random.Random(task["seed"])
    if task["dies_after"]:
        arm_kill("outbox.after_commit", task["dies_after"])
    destination = DESTINATIONS[task["destination"]](Path(task["path"]))
    with outbox.running(destination, partitions=PARTITIONS, settings=SETTINGS):
        for _ in range(task["transactions"]):
            key = f"k{chance.randrange(KEYS)}"
            with outbox.begin() as session:
                # The row orders the writers of a key.
                session.execute(text("UPDATE counter SET n = n + 1 WHERE key = :key"), {"key": key})
                number = session.execute(text("SELECT n FROM counter WHERE key = :key"), {"key": key}).scalar_one()
                outbox.send(session, "orders", str(number), key=key)
            time.sleep(chance.uniform(0, 0.05))


@pytest.fixture
def shop(engine):
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE counter (key varchar(9) PRIMARY KEY, n integer NOT NULL)"))
        rows = [{"key": f"k{number}"} for number in range(KEYS)]
        connection.execute(text("INSERT INTO counter (key, n) VALUES (:key, 0)"), rows)
    return engine


def storm(shop: Engine, path: Path, kills: int, destination: str) -> list[int]:
    """Let several writers be killed and start again, each so many times, then write in peace; return the exit codes."""
    program = "import sys; from tests.scenarios.crash.test_embedded_kills import write_and_relay as do; do(sys.argv[1])"
    url = shop.url.render_as_string(hide_password=False)

    def writer(number: int) -> list[int]:
        chance = random.Random(number)
        lives = [chance.randrange(20, 120) for _ in range(kills)] + [0]
        codes = []
        for seed, dies_after in enumerate(lives):
            task = {"url": url, "path": str(path), "seed": f"{number} {seed}", "dies_after": dies_after}
            task |= {"transactions": 120, "destination": destination}
            codes.append(run(["-c", program, json.dumps(task)], timeout=300).returncode)
        return codes

    with ThreadPoolExecutor(WRITERS) as pool:
        return [code for codes in pool.map(writer, range(WRITERS)) for code in codes]


def committed(shop: Engine) -> Numbers:
    """Every number that a writer has committed."""
    with shop.connect() as connection:
        rows = connection.execute(text("SELECT key, n FROM counter WHERE n > 0")).all()
    return {key: list(range(1, n + 1)) for key, n in rows}


def arrived(path: Path) -> Numbers:
    """The numbers in the order in which they arrived, copies too."""
    found: Numbers = defaultdict(list)
    for line in path.read_text().splitlines() if path.exists() else ():
        key, number = line.split()
        found[key].append(int(number))
    return dict(found)


def faults(sent: Numbers, came: Numbers) -> set[str]:
    """What is wrong: copies are not, as long as the first ones came in order."""
    wrong = set()
    for key in sent.keys() | came.keys():
        first_copies = list(dict.fromkeys(came.get(key, [])))
        if set(sent.get(key, [])) - set(first_copies):
            wrong.add("lost")
        if set(first_copies) - set(sent.get(key, [])):
            wrong.add("of no commit")
        if first_copies != sorted(first_copies):
            wrong.add("out of order")
    return wrong


@pytest.mark.parametrize(
    ("came", "wrong"),
    [
        ({"a": [1, 2, 3]}, set()),
        ({"a": [1, 2, 1, 2, 3]}, set()),
        ({"a": [1, 3]}, {"lost"}),
        ({}, {"lost"}),
        ({"a": [1, 3, 2]}, {"out of order"}),
        ({"a": [1, 2, 3, 4]}, {"of no commit"}),
        ({"a": [1, 2, 3], "b": [1]}, {"of no commit"}),
    ],
)
def test_the_judge_finds_what_is_wrong(came, wrong):
    assert faults({"a": [1, 2, 3]}, came) == wrong


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_writers_with_relays_inside_that_are_killed_right_after_their_commits_lose_nothing(shop, tmp_path, full):
    path, kills = tmp_path / "arrived", 20 if full else 4

    codes = storm(shop, path, kills, "right")
    sent, by_then = committed(shop), arrived(path)
    with Outbox(shop).running(File(path), partitions=PARTITIONS, settings=SETTINGS):
        all_came = eventually(lambda: "lost" not in faults(sent, arrived(path)), 120)

    assert sorted(codes) == [-signal.SIGKILL] * kills * WRITERS + [0] * WRITERS
    assert sum(map(len, by_then.values())) > 0
    assert (all_came, faults(sent, arrived(path))) == (True, set())


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_a_destination_that_answers_before_it_stores_is_caught(shop, tmp_path):
    path = tmp_path / "arrived"

    storm(shop, path, 4, "hasty")
    outbox = Outbox(shop)
    with outbox.running(File(path), partitions=PARTITIONS, settings=SETTINGS):
        assert eventually(lambda: sum(each.backlog for each in outbox.admin.look().subscriptions) == 0, 120)

    assert "lost" in faults(committed(shop), arrived(path))
