"""Care after the end of a process, with several processes."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import Message, Outbox
from outbox.model.slots import slot_of
from tests.support.leases import step_clock
from tests.support.parked import states
from tests.support.programs import Program
from tests.worker.test_process_ends import BEGIN, RELAY, lives

#: Two partitions, each with a call under way.
TWO_PARTITIONS = """
import time
def slowly(message):
    if message.body == b"fatal":
        time.sleep(0.3)
    meet(message)
    if message.body == b"slow":
        time.sleep(2)
        with open(sys.argv[2] + "-done", "a") as journal:
            journal.write("slow")
consumer = outbox.consumer("billing", partitions=2, concurrency=2, settings=briskly())
consumer.on("orders")(slowly)
consumer.until_empty()
"""


@pytest.mark.storm
def test_a_message_beside_the_fatal_one_is_no_dead_letter(engine, tmp_path):
    outbox, journal = Outbox(engine), tmp_path / "journal"
    keys = [next(f"{n}" for n in range(99) if slot_of(f"{n}", 256) % 2 == part) for part in (0, 1)]
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", b"fatal", key=keys[0]), Message("orders", b"slow", key=keys[1])])

    lives(TWO_PARTITIONS, engine, journal)

    assert states(engine) == {"dead": 1}


@pytest.mark.storm
def test_a_fatal_message_behind_another_of_its_key_repeats_its_neighbours_twice(engine, tmp_path):
    outbox, journal = Outbox(engine), tmp_path / "journal"
    with outbox.begin() as session:
        first = [Message("orders", b"a%d" % n, key=f"k{n}") for n in range(3)]
        second = [Message("orders", b"b%d" % n, key=f"k{n}") for n in range(3)]
        outbox.send_all(
            session, [*first, Message("orders", b"before", key="f"), *second, Message("orders", b"fatal", key="f")]
        )

    lives(RELAY, engine, journal)
    handled = Counter(journal.read_text().split())
    assert handled.pop("fatal") == 4
    assert max(handled.values()) <= 3
    assert states(engine) == {"dead": 1}


WITH_A_DEAD_LETTER = """
from outbox import Reject
class Fragile:
    destination = "test"
    def send(self, messages):
        found = []
        for message in messages:
            meet(message)
            found.append(Reject("never") if message.body == b"bad" else Done())
        return found
    def close(self): pass

Relay(outbox, Fragile(), settings=briskly()).until_empty()
"""


@pytest.mark.storm
def test_a_command_between_two_processes_takes_no_care_away(engine, tmp_path):
    """A person, or a timer, replays dead letters while the relay is started again."""
    outbox, journal = Outbox(engine), tmp_path / "journal"
    url = engine.url.render_as_string(hide_password=False)
    with outbox.begin() as session:
        outbox.send(session, "orders", b"bad", key="b")
    codes = [Program(["-c", BEGIN + WITH_A_DEAD_LETTER, url, str(journal)]).wait(60)]
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", b"fatal", key="f"), Message("orders", b"good", key="g")])

    while len(codes) < 2 or (codes[-1] and len(codes) < 9):
        codes.append(Program(["-c", BEGIN + WITH_A_DEAD_LETTER, url, str(journal)]).wait(60))
        with engine.begin() as connection:
            connection.execute(text("UPDATE outbox_lease SET length_ms = 1 WHERE owner IS NOT NULL"))
        # A timer comes after the length of the lease.
        step_clock(engine, timedelta(hours=1))
        if codes[-1]:
            outbox.admin.replay(all=True, by="timer")

    assert codes[-1] == 0
    assert "good" in journal.read_text()
