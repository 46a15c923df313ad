"""NATS JetStream in bad weather: servers that die, pause and come back, threads, forks, and the order of a key."""

import logging
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from outbox.model.message import Message
from outbox.model.verdict import Done, Unavailable
from outbox.senders.nats import NatsSender
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done, check_stored
from outbox.testing.servers import NatsServer
from tests.support.nats_streams import Stream, Witness, make_stream
from tests.support.pausing import paused
from tests.support.servers.proxy import TcpProxy


def test_at_most_one_message_of_a_key_is_unacknowledged(nats):
    """Seen from the other side: no second message of a key arrives before the first is acknowledged."""
    keys = ["a", "b", None, "a", None, "a", "b", None]
    sent = [a_message("orders", n, key=key) for n, key in enumerate(keys)]
    rounds = []

    with Witness(nats) as witness, ThreadPoolExecutor(1) as pool:
        sender = NatsSender(witness.url)
        verdicts = pool.submit(sender.send, sent)
        for expected in (5, 2, 1):
            rounds.append(witness.arrivals(expected))
            witness.answer()
        check_all_done(verdicts.result(), sent)
        sender.close()

    assert rounds == [[b"0", b"1", b"2", b"4", b"7"], [b"3", b"6"], [b"5"]]


def test_not_everything_is_under_way_at_once(nats):
    with Witness(nats) as witness:
        sender = NatsSender(witness.url, timeout=timedelta(seconds=3))

        verdicts = sender.send([a_message("orders", n) for n in range(2_000)])

        assert {type(verdict) for verdict in verdicts} == {Unavailable}
        assert len(witness.arrivals(1)) == 512
        sender.close()


def test_a_server_that_comes_back_is_found_again_with_few_words(caplog):
    began = time.monotonic()  # which nobody sets back, unlike the time of a record
    caplog.set_level(logging.INFO, logger="outbox")
    with NatsServer() as server:
        sent = [a_message("orders", n) for n in range(50)]
        make_stream(server.url, "orders")
        sender = NatsSender(server.url)
        check_all_done(sender.send(sent[:1]), sent[:1])

        server.kill()
        for _ in range(200):
            assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
        server.start()

        check_eventually_done(sender, sent)
        sender.close()
    first, *outage, last = caplog.records
    assert first.getMessage() == last.getMessage() == f"NATS: connected to nats://127.0.0.1:{server.port}"
    assert {record.levelname for record in outage} == {"WARNING"}
    assert len(outage) <= 1 + (time.monotonic() - began) / 60


def test_a_paused_server_is_unavailable_in_time_and_found_again():
    with NatsServer() as server, TcpProxy("127.0.0.1", server.port) as proxy:
        stream = Stream(server, proxy)
        sender = NatsSender(stream.url, timeout=timedelta(seconds=1))
        sent = [a_message("orders", bytes(100_000), key=f"k{n % 10}") for n in range(100)]
        check_eventually_done(sender, sent[:10])

        with paused(server):
            for _ in range(3):
                began = time.monotonic()
                assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
                assert time.monotonic() - began < 10

        check_eventually_done(sender, sent)
        check_stored(stream, sent)
        sender.close()
        stream.close()


def test_bad_weather_loses_repeats_and_reorders_nothing(stream, full):
    """Connections are refused, silent or cut at random; the stream drops second copies, so each is there once."""
    sender = NatsSender(stream.url, timeout=timedelta(seconds=0.5))
    sent: list[Message] = []

    with ThreadPoolExecutor(1) as pool:
        storm = pool.submit(rage, stream, seconds=60 if full else 5)
        while not storm.done():
            part = [a_message("orders", len(sent) + n, key=f"k{n % 20}" if n % 4 else None) for n in range(200)]
            sent += part
            while part:
                verdicts = sender.send(part)
                part = [one for one, verdict in zip(part, verdicts, strict=True) if not isinstance(verdict, Done)]
                time.sleep(0.02 if part else 0)
        storm.result()

    sender.close()
    check_stored(stream, sent)
    assert len(stream.stored()) == len(sent)


def rage(stream: Stream, *, seconds: float) -> None:
    """Break something every now and then, and mend it."""
    chance = random.Random(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chance.choice((stream.disappear, stream.fall_silent, stream.lose_next_answer))()
        time.sleep(chance.uniform(0, 1))
        stream.recover()
        time.sleep(chance.uniform(0, 0.5))


def test_another_server_of_the_address_is_taken(stream, nats):
    with TcpProxy("127.0.0.1", nats.port) as refusing, TcpProxy("127.0.0.1", nats.port) as silent:
        refusing.refuse()
        silent.black_hole()
        hosts = f"127.0.0.1:{refusing.port},127.0.0.1:{silent.port},127.0.0.1:{nats.port}"
        for n in range(6):
            sender = NatsSender(f"nats://{hosts}/{stream.prefix}?timeout=4")
            check_all_done(sender.send(sent := [a_message("orders", n)]), sent)
            sender.close()


def test_big_bodies_go_through_in_one_call(stream):
    sender = NatsSender(stream.url)
    sent = [a_message("orders", bytes(900_000), key=f"k{n % 5}" if n % 2 else None) for n in range(40)]

    check_all_done(sender.send(sent), sent)

    check_stored(stream, sent)
    sender.close()


def test_several_threads_may_send_at_once(stream, sender):
    calls = [[a_message("orders", n, key=f"{call}-{n % 3}") for n in range(100)] for call in range(8)]

    with ThreadPoolExecutor(8) as pool:
        for verdicts, sent in zip(pool.map(sender.send, calls), calls, strict=True):
            check_all_done(verdicts, sent)

    check_stored(stream, [message for sent in calls for message in sent])


def test_closing_ends_a_call_that_waits(stream):
    sender = NatsSender(stream.url, timeout=timedelta(seconds=30))
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    stream.fall_silent()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.send, [a_message("orders", 2)])
        time.sleep(0.2)
        began = time.monotonic()
        sender.close()
        assert [type(verdict) for verdict in waiting.result(60)] == [Unavailable]
    assert time.monotonic() - began < 15


def test_closing_ends_a_call_that_is_about_to_connect():
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        sender = NatsSender(f"nats://127.0.0.1:{silent.getsockname()[1]}", timeout=timedelta(seconds=30))
        waiting = pool.submit(sender.send, [a_message("orders", 1)])
        accepted, _ = silent.accept()
        sender.close()
        accepted.close()

        assert waiting.result(5) == [Unavailable("NATS: the sender was closed", everything=True)]


def test_closing_leaves_no_thread_behind(stream):
    before = threading.active_count()
    sender = stream.open()
    sender.send([a_message("orders", 1)])
    assert threading.active_count() > before

    sender.close()

    assert threading.active_count() == before


def test_a_closed_sender_begins_anew(stream, sender):
    sender.close()

    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)


SCRIPT = """
import os, sys
from outbox.model.message import Message
from outbox.model.message import Message
from outbox.senders.nats import NatsSender
from outbox.model.verdict import DONE

def send():
    assert list(sender.send([Message("orders", b"x", key="k") for _ in range(20)])) == [DONE] * 20

def wait(pid):
    assert os.waitpid(pid, 0)[1] == 0

sender = NatsSender(sys.argv[1])
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
def test_a_process_may_fork_and_end_as_it_likes(stream, rest, sent):
    """Each process has a connection of its own, and none has a word to say at its end."""
    command = [sys.executable, "-W", "default", "-c", SCRIPT + rest, stream.url]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(stream.received()) == sent


def test_idle_outages_leave_nothing_behind(stream, sender):
    """Connections that failed do not pile up."""
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    before = len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(5):
        stream.disappear()
        sender.send([a_message("orders", bytes(10_000)) for _ in range(100)])
        stream.recover()
        check_eventually_done(sender, [a_message("orders", 2)])

    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
