"""Redis Streams in bad weather: servers that die, pause and come back, threads, forks, and the order of a key."""

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
from redis import Redis

from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders.redis import RedisSender
from outbox.testing.sender_contract import (
    a_message,
    check_all_done,
    check_eventually_done,
    check_stored,
    outcome_of,
)
from tests.support.pausing import paused
from tests.support.redis_streams import SlowRedis, Streams
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.redis import RedisServer
from tests.support.weather import rage, send_through


@pytest.fixture
def streams(redis: RedisServer) -> Iterator[Streams]:
    """Streams of this test, behind a proxy of this test."""
    with TcpProxy("127.0.0.1", redis.port) as proxy:
        streams = Streams(redis, proxy)
        yield streams
        streams.close()


def test_the_messages_of_a_key_do_not_wait_for_each_other(streams):
    """What arrives while no answer does."""
    sent = [a_message("orders", n, key=key) for n, key in enumerate(["a", "b", None, "a", None, "a", "b", None])]
    sender = streams.open()
    check_all_done(sender.send(first := [a_message("first", 1)]), first)

    streams.proxy.hold_answers()
    assert outcome_of(sender, sent) == [Unavailable] * 8
    streams.recover()

    assert [each[b"Outbox-Body"] for each in streams.entries("orders")] == [message.body for message in sent]
    sender.close()


def test_a_key_of_several_topics_waits_where_its_topic_changes(streams):
    """One stream may refuse what another accepts."""
    sent = [a_message(topic, n, key="a") for n, topic in enumerate(["one", "one", "two", "two", "one"])]
    sender = streams.open()
    check_all_done(sender.send(first := [a_message("first", 1)]), first)

    streams.proxy.hold_answers()
    assert outcome_of(sender, sent) == [Unavailable] * 5
    streams.recover()

    assert [each[b"Outbox-Body"] for each in streams.entries("one")] == [b"0", b"1"]
    assert streams.entries("two") == []
    sender.close()


@pytest.mark.parametrize("unfit", [1, 4])
def test_what_follows_a_refused_message_of_its_key_is_not_stored(streams, unfit):
    """The row has headers that no destination could carry."""
    sent = [a_message("orders", n, key=f"k{n % 2}") for n in range(8)]
    sent[unfit]._headers = "[]"
    sender = streams.open()

    verdicts = sender.send(sent)

    behind = [n for n in range(unfit, 8) if n % 2 == unfit % 2]
    assert [n for n, verdict in enumerate(verdicts) if verdict != DONE] == behind
    assert isinstance(verdicts[unfit], Reject)
    stored = [message.body for n, message in enumerate(sent) if n not in behind]
    assert sorted(each[b"Outbox-Body"] for each in streams.entries("orders")) == stored
    sender.close()


def test_a_server_without_memory_stores_nothing_of_a_key_behind_what_it_refused(streams):
    sent = [a_message("orders", n, key="a") for n in range(20)]
    sender = streams.open()
    check_all_done(sender.send(first := [a_message("first", 1)]), first)
    streams.client.config_set("maxmemory", 1)

    refused = sender.send(sent)
    streams.client.config_set("maxmemory", 0)

    assert {type(verdict) for verdict in refused} == {Unavailable}
    assert streams.entries("orders") == []
    check_eventually_done(sender, sent)
    assert [each[b"Outbox-Body"] for each in streams.entries("orders")] == [message.body for message in sent]
    sender.close()


def test_memory_that_comes_back_in_mid_call_lets_no_message_of_a_key_pass(streams):
    """The server refuses for a moment, again and again, while a call of many messages is carried out."""
    sent = [a_message("orders", b"x" * 2_000, key="a") for _ in range(1_000)]
    sender = streams.open()
    over = threading.Event()

    def squeeze() -> None:
        while not over.is_set():
            streams.client.config_set("maxmemory", 1)
            streams.client.config_set("maxmemory", 0)

    thread = threading.Thread(target=squeeze)
    thread.start()
    answers = [[verdict is DONE for verdict in sender.send(sent)] for _ in range(30)]
    over.set()
    thread.join()

    assert answers == [sorted(done, reverse=True) for done in answers]
    sender.close()


def test_a_server_that_comes_back_is_found_again_with_few_words(caplog):
    began = time.monotonic()  # which nobody sets back, unlike the time of a record
    caplog.set_level(logging.INFO, logger="outbox")
    with RedisServer(settings={"appendfsync": "always"}) as server:
        sent = [a_message("orders", n) for n in range(50)]
        sender = RedisSender(server.url, timeout=timedelta(seconds=1))
        check_all_done(sender.send(sent[:1]), sent[:1])

        server.kill()
        for _ in range(200):
            assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
        server.start()

        check_eventually_done(sender, sent)
        sender.close()
    first, *outage, last = (record for record in caplog.records if record.name == "outbox.senders.redis")
    assert first.getMessage() == last.getMessage() == f"Redis: connected to redis://127.0.0.1:{server.port}"
    assert {record.levelname for record in outage} == {"WARNING"}
    assert len(outage) <= 1 + (time.monotonic() - began) / 60


@pytest.mark.parametrize("kills", [3])
def test_a_server_that_is_killed_in_mid_stream_loses_and_reorders_nothing(kills):
    """Its log is on disk before it answers."""
    with RedisServer(settings={"appendfsync": "always"}) as server, TcpProxy("127.0.0.1", server.port) as proxy:
        streams = Streams(server, proxy)
        sender = streams.open()

        def storm() -> None:
            for _ in range(kills):
                time.sleep(0.7)
                server.kill()
                time.sleep(0.3)
                server.start()

        sent = send_through(sender, storm)

        sender.close()
        stored = [each.message_id for each in streams.read()]
        assert set(stored) == {message.message_id for message in sent}
        by_key = [message.message_id for message in sent if message.key == "k1"]
        assert [each for each in dict.fromkeys(stored) if each in set(by_key)] == by_key
        streams.close()


def test_a_paused_server_is_unavailable_in_time_and_found_again():
    with RedisServer() as server, TcpProxy("127.0.0.1", server.port) as proxy:
        streams = Streams(server, proxy)
        sender = RedisSender(streams.url, timeout=timedelta(seconds=1))
        sent = [a_message("orders", bytes(5_000), key=f"k{n % 10}") for n in range(100)]
        check_all_done(sender.send(sent[:10]), sent[:10])

        with paused(server):
            for _ in range(3):
                began = time.monotonic()
                assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
                assert time.monotonic() - began < 10

        check_eventually_done(sender, sent)
        check_stored(streams, sent)
        sender.close()
        streams.close()


@pytest.mark.parametrize("n_messages", [1, 3])
def test_a_primary_that_has_become_a_replica_is_left(n_messages):
    """Its address leads to another server by then, while the old connection is as good as before."""
    with RedisServer() as old, RedisServer() as new, TcpProxy("127.0.0.1", old.port) as proxy:
        sender = RedisSender(f"redis://127.0.0.1:{proxy.port}", timeout=timedelta(seconds=2))
        sent = [a_message("orders", n, key="a") for n in range(n_messages)]
        check_all_done(sender.send(sent), sent)
        proxy.redirect(new.port)
        with Redis(port=old.port) as client:
            client.replicaof("127.0.0.1", new.port)

        [refused, *_] = sender.send(sent)
        assert isinstance(refused, Unavailable)
        assert "read only replica" in refused.error

        check_all_done(sender.send(sent), sent)
        sender.close()


@pytest.mark.parametrize("slow_from", [b"CLIENT", b"INFO", b"XADD"])
def test_answers_that_come_byte_by_byte_make_no_call_longer(slow_from):
    with SlowRedis(slow_from) as server:
        sender = RedisSender(server.url, timeout=timedelta(seconds=1))
        began = time.monotonic()

        assert outcome_of(sender, [a_message("orders", n) for n in range(10)]) == [Unavailable] * 10

        assert time.monotonic() - began < 2.5
        sender.close()


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_connection_that_is_cut_anywhere_loses_and_reorders_nothing(streams, direction):
    sender = streams.open()
    check_all_done(sender.send(sent := [a_message("orders", "first")]), sent)
    for cut in range(0, 900, 29):
        part = [a_message("orders", f"{cut}-{n}", key=f"k{n % 2}") for n in range(6)]
        sent += part
        streams.proxy.cut_after(cut, direction)
        check_eventually_done(sender, part)

    sender.close()
    streams.recover()
    check_stored(streams, sent)


def test_bad_weather_loses_and_reorders_nothing(streams, full):
    sender = RedisSender(streams.url, timeout=timedelta(seconds=0.5))

    sent = send_through(sender, partial(rage, streams, seconds=60 if full else 5), topics=("orders", "mail"))

    sender.close()
    check_stored(streams, sent)


def test_several_threads_may_send_at_once(streams):
    sender = streams.open()
    calls = [[a_message("orders", n, key=f"{call}-{n % 3}") for n in range(100)] for call in range(8)]

    with ThreadPoolExecutor(8) as pool:
        for verdicts, sent in zip(pool.map(sender.send, calls), calls, strict=True):
            check_all_done(verdicts, sent)

    check_stored(streams, [message for sent in calls for message in sent])
    sender.close()


def test_a_closed_sender_begins_anew(streams):
    sender = streams.open()
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    sender.close()

    check_all_done(sender.send(more := [a_message("orders", 2)]), more)
    sender.close()


def test_idle_outages_leave_nothing_behind(streams):
    """Connections that failed do not pile up."""
    sender = streams.open()
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    before = len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(5):
        streams.disappear()
        sender.send([a_message("orders", bytes(10_000)) for _ in range(100)])
        streams.recover()
        check_eventually_done(sender, [a_message("orders", 2)])

    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    sender.close()


SCRIPT = """
import os, sys
from outbox.model.message import Message
from outbox.senders.redis import RedisSender
from outbox.model.verdict import DONE

def send():
    assert list(sender.send([Message("orders", b"x", key="k") for _ in range(20)])) == [DONE] * 20

def wait(pid):
    assert os.waitpid(pid, 0)[1] == 0

sender = RedisSender(sys.argv[1])
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
def test_a_process_may_fork_and_end_as_it_likes(streams, rest, sent):
    """Each process has a connection of its own, and none has a word to say at its end."""
    command = [sys.executable, "-W", "default", "-c", SCRIPT + rest, streams.url]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(streams.entries("orders")) == sent


def test_a_second_copy_after_a_lost_answer_has_the_same_id_and_bytes(streams):
    sender = streams.open()
    sent = [a_message("orders", "x", key="k")]
    check_all_done(sender.send(first := [a_message("first", 1)]), first)

    streams.lose_next_answer()
    assert outcome_of(sender, sent) == [Unavailable]
    streams.recover()
    assert list(sender.send(sent)) == [DONE]

    one, other = streams.entries("orders")
    assert one == other
    sender.close()
