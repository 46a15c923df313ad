"""Kafka in bad weather: brokers that die, pause and come back, threads, forks, and the order of a key."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders import kafka as kafka_sender
from outbox.senders.kafka import KafkaSender
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done, check_stored, outcome_of
from tests.support.kafka_topics import FarKafka, Topics
from tests.support.pausing import paused
from tests.support.weather import rage, send_through


@pytest.fixture
def topics(kafka: FarKafka) -> Iterator[Topics]:
    """Topics of this test, behind the proxy."""
    topics = Topics(kafka)
    topics.make("orders")
    yield topics
    topics.close()


@pytest.fixture
def sender(topics: Topics) -> Iterator[KafkaSender]:
    """A sender to them."""
    sender = topics.open()
    yield sender
    sender.close()


@pytest.fixture(scope="module")
def mortal() -> Iterator[FarKafka]:
    """A broker that may be killed."""
    with FarKafka() as kafka:
        yield kafka


def test_an_outage_and_a_message_that_is_too_large_are_no_fatal_errors_in_the_log(topics, sender, caplog):
    """The client calls it one when records behind a refused one are thrown away, which is what keeps their order."""
    caplog.set_level(logging.INFO)
    topics.make("narrow", max_message_bytes="5000")
    check_eventually_done(sender, [a_message("orders", n, key=f"k{n % 7}") for n in range(60)])
    sender.send([a_message("narrow", str(n).ljust(6_000 if n == 30 else 300), key=f"k{n % 7}") for n in range(60)])
    topics.fall_silent()
    outcome_of(sender, [a_message("orders", n, key=f"k{n % 7}") for n in range(60)])
    topics.recover()
    check_eventually_done(sender, [a_message("orders", n, key=f"k{n % 7}") for n in range(60)])
    topics.disappear()
    outcome_of(sender, [a_message("orders", n, key=f"k{n % 7}") for n in range(60)])

    assert [record.getMessage() for record in caplog.records if record.name.endswith(".client")] == []
    assert {record.levelname for record in caplog.records} == {"INFO", "WARNING"}


def test_what_follows_a_refused_message_of_its_key_is_not_stored_before_it(topics, sender):
    """The broker refuses one message of many that are under way; those behind it must not pass it."""
    topics.make("narrow", max_message_bytes="5000")
    sent = [a_message("narrow", str(n).ljust(6_000 if n == 30 else 300), key=f"k{n % 7}") for n in range(60)]

    verdicts = sender.send(sent)

    behind = [n for n in range(31, 60) if n % 7 == 30 % 7]
    assert [n for n, verdict in enumerate(verdicts) if verdict != DONE] == [30, *behind]
    assert isinstance(verdicts[30], Reject)
    stored = [record.value() for record in topics.records()]
    assert sorted(stored) == sorted(sent[n].body for n, verdict in enumerate(verdicts) if verdict == DONE)


def test_a_refused_batch_beside_a_silent_partition_makes_no_dead_letters(monkeypatch):
    """One of a batch is too large, which one is not known yet, and then time runs out for another partition."""
    made: list[str] = []

    class HalfSilent(kafka_sender._Connection):
        def __init__(self, settings: object, prefix: str, *, streams: bool) -> None:
            super().__init__({}, prefix, streams=streams)
            made.append("stream" if streams else "careful")
            self._topics = {"orders"}
            self._handed_over: list[int] = []

        def hand_over(self, call, until):
            while not call.is_refused and (index := call.take()) is not None:
                self._handed_over.append(index)

        def wait(self, call, seconds):
            for index in [index for index in self._handed_over if index < 3]:
                self._handed_over.remove(index)
                self._report(call, index, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)  # type: ignore[arg-type]
            time.sleep(min(seconds, 0.02))

    monkeypatch.setattr(kafka_sender, "_Connection", HalfSilent)
    sender = KafkaSender("kafka://localhost:9092?timeout=1")

    for _ in range(2):
        verdicts = sender.send([a_message("orders", n, key=f"k{n}") for n in range(4)])
        assert {type(verdict) for verdict in verdicts} == {Unavailable}
    sender.close()

    assert made == ["stream", "careful"]


def test_the_first_message_that_a_partition_gets_may_be_refused(topics, sender):
    """A broker takes any record as the first one of a producer that it does not know, also one behind a gap."""
    sizes = [1_100_000, 400_000, 400_000, 400_000, 400_000]
    sent = [a_message("alpha", b"x" * size, key="a") for size in sizes]

    verdicts = sender.send(sent)

    assert [type(verdict) for verdict in verdicts] == [Reject] + [Unavailable] * 4
    assert topics.records() == []


def test_messages_that_are_too_large_only_together_keep_their_order(topics, sender):
    """The client puts three into one request, which the broker refuses."""
    topics.make("narrow", max_message_bytes="700000")
    sent = [a_message("narrow", bytes([n]) * 300_000, key="a") for n in range(5)]

    check_all_done(sender.send(sent), sent)

    assert [record.value()[0] for record in topics.records()] == [0, 1, 2, 3, 4]


def test_after_a_refusal_at_most_one_message_of_a_key_is_unacknowledged(kafka, topics, sender):
    """Without the guarantee of a stream, each message of a key waits until the one before it is stored."""
    topics.make("single", partitions=1, max_message_bytes="5000")
    refused, first = sender.send([a_message("single", b"x" * 6_000), a_message("single", "first")])
    assert (type(refused), first) == (Reject, DONE)
    sent = [a_message("single", n, key=key) for n, key in enumerate(["a", "b", None, "a", None, "a", "b", None])]

    kafka.proxy.hold_answers()
    assert outcome_of(sender, sent) == [Unavailable] * 8
    topics.recover()

    arrived = sorted(record.value() for record in topics.records())
    assert arrived == [b"0", b"1", b"2", b"4", b"7", b"first"]


def test_a_broker_that_comes_back_is_found_again_with_few_words(mortal, caplog):
    began = time.monotonic()  # which nobody sets back, unlike the time of a record
    caplog.set_level(logging.INFO, logger="outbox")
    topics = Topics(mortal)
    sent = [a_message("alpha", n) for n in range(50)]
    sender = KafkaSender(f"kafka://{mortal.server.servers}/{topics.prefix}", timeout=timedelta(seconds=2))
    check_all_done(sender.send(sent[:1]), sent[:1])

    mortal.server.kill()
    for _ in range(20):
        assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
    mortal.server.start()

    check_eventually_done(sender, sent, seconds=60)
    sender.close()
    topics.close()
    first, *outage, last = (record for record in caplog.records if record.name == "outbox.senders.kafka")
    where = f"kafka://{mortal.server.servers}"
    assert first.getMessage() == last.getMessage() == f"Kafka: connected to {where}"
    assert {record.levelname for record in outage} == {"WARNING"}
    assert len(outage) <= 1 + (time.monotonic() - began) / 60


def test_a_broker_that_is_killed_in_mid_stream_loses_and_reorders_nothing(mortal):
    topics = Topics(mortal)
    sender = topics.open()

    def storm() -> None:
        for _ in range(3):
            time.sleep(1)
            mortal.server.kill()
            time.sleep(0.3)
            mortal.server.start()

    sent = send_through(sender, storm, topics=("alpha",))

    sender.close()
    check_stored(topics, sent)
    topics.close()


def test_a_paused_broker_is_unavailable_in_time_and_found_again(mortal):
    topics = Topics(mortal)
    sender = KafkaSender(topics.url, timeout=timedelta(seconds=1))
    sent = [a_message("alpha", bytes(100_000), key=f"k{n % 10}") for n in range(100)]
    check_eventually_done(sender, sent[:10])

    with paused(mortal.server):
        for _ in range(3):
            began = time.monotonic()
            assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
            assert time.monotonic() - began < 10

    check_eventually_done(sender, sent, seconds=60)
    check_stored(topics, sent)
    sender.close()
    topics.close()


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_connection_that_is_cut_anywhere_loses_and_reorders_nothing(kafka, topics, sender, direction):
    check_all_done(sender.send(sent := [a_message("orders", "first")]), sent)
    for cut in range(0, 900, 43):
        part = [a_message("orders", f"{cut}-{n}", key=f"k{n % 2}") for n in range(6)]
        sent += part
        kafka.proxy.cut_after(cut, direction)
        check_eventually_done(sender, part)

    topics.recover()
    check_stored(topics, sent)


def test_bad_weather_loses_and_reorders_nothing(topics, full):
    sender = KafkaSender(topics.url, timeout=timedelta(seconds=0.7))

    sent = send_through(sender, partial(rage, topics, seconds=60 if full else 5))

    sender.close()
    check_stored(topics, sent)


def test_several_threads_may_send_at_once(topics, sender):
    calls = [[a_message("orders", n, key=f"{call}-{n % 3}") for n in range(100)] for call in range(8)]

    with ThreadPoolExecutor(8) as pool:
        for verdicts, sent in zip(pool.map(sender.send, calls), calls, strict=True):
            check_all_done(verdicts, sent)

    check_stored(topics, [message for sent in calls for message in sent])


def test_closing_ends_a_call_that_waits(topics):
    sender = KafkaSender(topics.url, timeout=timedelta(seconds=30))
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    topics.fall_silent()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.send, [a_message("orders", 2)])
        time.sleep(0.2)
        began = time.monotonic()
        sender.close()
        assert [type(verdict) for verdict in waiting.result(60)] == [Unavailable]
    assert time.monotonic() - began < 15


def test_a_closed_sender_begins_anew(sender):
    sender.close()

    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)


def test_big_bodies_go_through_in_one_call(topics, sender):
    sent = [a_message("orders", bytes(900_000), key=f"k{n % 5}" if n % 2 else None) for n in range(40)]

    check_eventually_done(sender, sent)

    check_stored(topics, sent)


def test_idle_outages_leave_nothing_behind(topics, sender):
    """Producers that failed do not pile up, nor do their threads."""
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    files, tasks = Path("/proc/self/fd"), Path("/proc/self/task")
    before = len(list(files.iterdir())), len(list(tasks.iterdir())), threading.active_count()

    for _ in range(5):
        topics.disappear()
        sender.send([a_message("orders", bytes(10_000)) for _ in range(100)])
        topics.recover()
        check_eventually_done(sender, [a_message("orders", 2)])

    after = len(list(files.iterdir())), len(list(tasks.iterdir())), threading.active_count()
    assert all(now <= then + 3 for now, then in zip(after, before, strict=True)), (before, after)


def test_a_second_copy_has_the_same_id_and_bytes(topics, sender):
    sent = [a_message("orders", "x", key="k")]

    for _ in range(2):
        assert list(sender.send(sent)) == [DONE]

    one, other = topics.records()
    assert (one.value(), one.key(), one.headers()) == (other.value(), other.key(), other.headers())


SCRIPT = """
import os, sys
from outbox.model.message import Message
from outbox.senders.kafka import KafkaSender
from outbox.model.verdict import DONE

def send():
    assert list(sender.send([Message("orders", b"x", key="k") for _ in range(20)])) == [DONE] * 20

def wait(pid):
    assert os.waitpid(pid, 0)[1] == 0

sender = KafkaSender(sys.argv[1])
send()
"""


@pytest.mark.parametrize(
    ("rest", "sent"),
    [
        ("", 20),  # nobody closes it
        ("sender.close()", 20),
        ("pid = os.fork(); send(); send(); pid and wait(pid)", 100),
        ("pid = os.fork(); send(); sender.close(); pid and wait(pid)", 60),
        ("pid = os.fork(); pid or sys.exit(); wait(pid); send()", 40),
        ("pid = os.fork(); pid or (sender.close(), sys.exit()); wait(pid); send()", 40),
    ],
)
def test_a_process_may_fork_and_end_as_it_likes(topics, rest, sent):
    """Each process has a producer of its own, and none has a word to say at its end."""
    command = [sys.executable, "-W", "default", "-c", SCRIPT + rest, topics.url]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(topics.records()) == sent
