"""The relay's own process collects rarely, and still collects; an application's collector is left alone."""

import atexit
import gc
import subprocess
import sys

import pytest

from outbox import Outbox, Relay
from tests.support.command_line import outbox as command
from tests.support.destination import Destination, accepted

#: Prints how many collections there were while messages came and went, and how many while circles were left behind.
SCRIPT = """
import gc
from outbox import Message
from outbox.runtime.garbage import collect_rarely

def collections():
    return sum(each["collections"] for each in gc.get_stats())

class Circle:
    def __init__(self):
        self.me = self

collect_rarely(100_000)
before = collections()
for _ in range(100):
    batch = [Message("orders", b"{}", headers={"a": "1"}) for _ in range(1_000)]
between = collections()
for _ in range(300_000):
    Circle()
left = sum(isinstance(each, Circle) for each in gc.get_objects())
print(between - before, collections() - between, left)
"""


def test_messages_start_no_collection_and_circles_do():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    for_messages, for_circles, left = map(int, done.stdout.split())

    assert for_messages == 0
    assert for_circles >= 2
    assert left <= 100_000


@pytest.mark.parametrize("databases", [1, 2])
def test_the_command_collects_rarely(tmp_path, monkeypatch, databases):
    thresholds = []
    monkeypatch.setattr(gc, "set_threshold", lambda *given: thresholds.append(given))
    urls = [f"sqlite:///{tmp_path / name}" for name in ("a.sqlite3", "b.sqlite3")[:databases]]
    for url in urls:
        assert command(None, "db", "upgrade", f"--database={url}").code == 0
    thresholds.clear()
    ended = command(None, "relay", "--until-empty", "--to", "stdout:", *(f"--database={url}" for url in urls))

    assert ended.code == 0
    # As any command, and once more as a relay, which has made its objects by then.
    assert thresholds.count((100_000, *gc.get_threshold()[1:])) == 2


def test_a_short_command_collects_rarely_and_not_at_its_end(sqlite_engine, monkeypatch):
    """The collections took a third of the time of `outbox status`."""
    thresholds: list[tuple[int, ...]] = []
    at_the_end: list[object] = []
    monkeypatch.setattr(gc, "set_threshold", lambda *given: thresholds.append(given))
    monkeypatch.setattr(atexit, "register", at_the_end.append)

    ended = command(sqlite_engine, "subscriptions", "list")

    assert (ended.code, len(at_the_end), thresholds[0]) == (0, 1, (100_000, *gc.get_threshold()[1:]))


def test_an_embedded_relay_leaves_the_collector_alone(sqlite_engine):
    before = gc.get_threshold(), gc.isenabled()
    outbox = Outbox(sqlite_engine)
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
    seen = []

    def answer(message):
        seen.append((gc.get_threshold(), gc.isenabled()))
        return accepted(message)

    Relay(outbox, Destination(answer)).until_empty()

    assert [*seen, (gc.get_threshold(), gc.isenabled())] == [before, before]
