"""Care after the end of a process, with several processes."""

from __future__ import annotations

from collections import Counter

import pytest

from outbox import Message, Outbox
from outbox.model.slots import slot_of
from tests.support.parked import states
from tests.worker.test_process_ends import RELAY, lives

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


def test_a_message_beside_the_fatal_one_is_no_dead_letter(engine, tmp_path):
    outbox, journal = Outbox(engine), tmp_path / "journal"
    keys = [next(f"{n}" for n in range(99) if slot_of(f"{n}", 256) % 2 == part) for part in (0, 1)]
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", b"fatal", key=keys[0]), Message("orders", b"slow", key=keys[1])])

    codes = lives(TWO_PARTITIONS, engine, journal)

    print(codes, Counter(journal.read_text().split()), states(engine))
    assert states(engine) == {"dead": 1}


def test_a_fatal_message_behind_another_of_its_key_repeats_its_neighbours_twice(engine, tmp_path):
    outbox, journal = Outbox(engine), tmp_path / "journal"
    with outbox.begin() as session:
        first = [Message("orders", b"a%d" % n, key=f"k{n}") for n in range(3)]
        second = [Message("orders", b"b%d" % n, key=f"k{n}") for n in range(3)]
        outbox.send_all(
            session, [*first, Message("orders", b"before", key="f"), *second, Message("orders", b"fatal", key="f")]
        )

    codes = lives(RELAY, engine, journal)
    handled = Counter(journal.read_text().split())
    print(codes, handled, states(engine))
    assert handled.pop("fatal") == 4
    assert max(handled.values()) <= 3
    assert states(engine) == {"dead": 1}
