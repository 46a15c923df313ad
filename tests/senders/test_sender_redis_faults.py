"""Redis Streams in bad weather: the contract, servers without memory, and the order of a key."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders.redis import RedisSender
from outbox.senders.redis_server import Connecting, Server, end_of_call, send
from outbox.testing.sender_contract import (
    a_message,
    check_all_done,
    check_eventually_done,
    outcome_of,
)
from tests.support.places import begun, placed
from tests.support.redis_streams import SlowRedis, Streams
from tests.support.remote import UNFIT_HEADERS, RemoteSenderContract
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.redis import RedisServer
from tests.support.waiting import eventually

#: Its log is on disk before it answers.
fragile = begun(lambda: RedisServer(settings={"appendfsync": "always"}))
mortal = placed(Streams, "fragile")


class TestBadWeather(RemoteSenderContract):
    """A call that waits ends by its own deadline, half of which is for the disk."""

    at = "streams"
    refuses = "Redis cannot carry it: "
    closing_ends_calls = False
    body = 5_000
    topics = ("alpha", "beta")
    unfit = (
        *UNFIT_HEADERS,
        ({"headers": '{"outbox-body": "c"}'}, "headers['outbox-body']: the name is reserved by the outbox"),
        ({"topic": "a\ud800"}, "'utf-8' codec can't encode character"),
        ({"key": "\ud800"}, "'utf-8' codec can't encode character"),
    )


@pytest.mark.storm
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


@pytest.mark.storm
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


@pytest.mark.parametrize("rounds", [1, 2])
def test_closing_lets_a_call_end_well_and_closes_its_connection_then(streams, rounds):
    """The client fails in many ways where another thread takes a connection away from it.

    A key waits where its topic changes, and the second round needs another connection.
    """
    sent = [a_message(topic, n, key="a") for n, topic in enumerate(["orders"] * 3 + ["more"] * (rounds - 1))]
    sender = streams.open(seconds=60)
    check_all_done(sender.send(first := [a_message("first", 1)]), first)
    connected = len(streams.client.client_list())

    streams.proxy.hold_answers()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(sender.send, sent)
        assert eventually(lambda: len(streams.entries("orders")) == 3)
        sender.close()
        streams.recover()
        check_all_done(call.result(), sent)

    assert eventually(lambda: len(streams.client.client_list()) < connected)


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


@pytest.mark.storm
def test_memory_that_comes_back_in_mid_call_lets_no_message_of_a_key_pass(streams):
    """The server refuses for a moment, again and again, while a call of several transactions is carried out."""
    sent = [a_message("orders", b"x" * 2_000, key=f"k{n % 7}") for n in range(1_001)]
    sender = streams.open()
    over = threading.Event()

    def squeeze() -> None:
        while not over.is_set():
            streams.client.config_set("maxmemory", 1)
            streams.client.config_set("maxmemory", 0)

    thread = threading.Thread(target=squeeze)
    thread.start()
    calls = [[verdict is DONE for verdict in sender.send(sent)] for _ in range(30)]
    over.set()
    thread.join()

    answers = [done[start::7] for done in calls for start in range(7)]
    assert answers == [sorted(done, reverse=True) for done in answers]
    sender.close()


@pytest.mark.storm
@pytest.mark.parametrize("n_messages", [1, 3])
def test_a_primary_that_has_become_a_replica_is_left(n_messages):
    """Its address leads to another server by then, while the old connection is as good as before."""
    with RedisServer() as old, RedisServer() as new, TcpProxy("127.0.0.1", old.port) as proxy:
        sender = RedisSender(f"redis://127.0.0.1:{proxy.port}", timeout=timedelta(seconds=60))
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


@pytest.mark.storm
@pytest.mark.parametrize("slow_from", [b"CLIENT", b"INFO", b"XADD"])
def test_answers_that_come_byte_by_byte_make_no_call_longer(slow_from):
    with SlowRedis(slow_from) as server:
        sender = RedisSender(server.url, timeout=timedelta(seconds=1))
        began = time.monotonic()

        assert outcome_of(sender, [a_message("orders", n) for n in range(10)]) == [Unavailable] * 10

        assert time.monotonic() - began < 20
        sender.close()


def test_a_server_that_reads_nothing_is_written_to_until_the_end_of_the_call():
    """Several servers of a cluster may hang at once. Here the client's own timeout is half a day."""
    silent, connected = socket.socketpair()
    connecting = Connecting(scheme="redis", user=None, password="s3cr3t", seconds=100_000, database=0, tls=None)
    connection: Any = Server("127.0.0.1", 1, connecting).client.connection_pool.make_connection()
    connection._sock = connected
    end = end_of_call.set(time.monotonic() + 0.1)

    with silent, pytest.raises(RedisTimeoutError, match="Timeout writing to socket"):
        send(connection, [bytes(50_000_000)])

    end_of_call.reset(end)
    assert "s3cr3t" not in repr(connecting)
