"""RabbitMQ in bad weather: servers that die, pause, fill up and come back, threads, forks, and the order of a key."""

import logging
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Unavailable
from outbox.senders.rabbitmq import RabbitSender
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done, check_stored
from tests.conftest import started
from tests.support.pausing import paused
from tests.support.rabbit_exchanges import Exchange, Witness, out_of_memory
from tests.support.servers.proxy import Direction, TcpProxy
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.waiting import eventually

QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture(scope="module")
def fragile() -> Iterator[RabbitServer]:
    """A server of these tests alone, to be killed, paused and filled up."""
    with started(RabbitServer) as server:
        yield server


@pytest.fixture
def quorum(fragile: RabbitServer) -> Iterator[Exchange]:
    """An exchange there, with a quorum queue."""
    with TcpProxy("127.0.0.1", fragile.port) as proxy:
        exchange = Exchange(fragile, proxy, **QUORUM)
        yield exchange
        exchange.close()


def test_at_most_one_message_of_a_key_is_unconfirmed():
    """Seen from the other side: no second message of a key arrives before the first is confirmed."""
    keys = ["a", "b", None, "a", None, "a", "b", None]
    sent = [a_message("orders", n, key=key) for n, key in enumerate(keys)]
    rounds = []

    with Witness() as witness, closing(RabbitSender(witness.url)) as sender, ThreadPoolExecutor(1) as pool:
        verdicts = pool.submit(sender.send, sent)
        for expected in (5, 2, 1):
            rounds.append(witness.arrivals(expected))
            witness.confirm(at_once=expected == 5)
        check_all_done(verdicts.result(), sent)

    assert rounds == [[b"0", b"1", b"2", b"4", b"7"], [b"3", b"6"], [b"5"]]


def test_what_is_refused_by_one_frame_is_not_done():
    sent = [a_message("orders", n, key=key) for n, key in enumerate(["a", "b", None, "a"])]

    with Witness() as witness, closing(RabbitSender(witness.url)) as sender, ThreadPoolExecutor(1) as pool:
        verdicts = pool.submit(sender.send, sent)
        witness.arrivals(3)
        witness.refuse()
        refused = Unavailable("RabbitMQ: a queue for routing key 'orders' refused it; it may be full")
        assert verdicts.result() == [refused] * 3 + [Unavailable("an earlier message of its key was not stored")]


def test_not_everything_is_under_way_at_once():
    with Witness() as witness, closing(RabbitSender(witness.url, timeout=timedelta(seconds=3))) as sender:
        verdicts = sender.send([a_message("orders", n) for n in range(2_000)])

        address = witness.url.partition("/?")[0]
        assert len(verdicts) == 2_000
        assert set(verdicts) == {Unavailable(f"RabbitMQ: {address}: no answer within 2.7 s")}
        assert len(witness.arrivals(1)) == 512


def test_a_connection_that_the_server_closes_is_lost_with_the_servers_words():
    with Witness() as witness, closing(RabbitSender(witness.url)) as sender, ThreadPoolExecutor(1) as pool:
        verdicts = pool.submit(sender.send, [a_message("orders", 1)])
        witness.arrivals(1)
        witness.close_connection(320, "CONNECTION_FORCED - shutdown")

        address = witness.url.partition("/?")[0]
        lost = f"RabbitMQ: {address}: the connection was lost: CONNECTION_FORCED - shutdown"
        assert verdicts.result() == [Unavailable(lost)]


def test_a_server_that_is_killed_in_mid_stream_has_everything_that_is_done(fragile, quorum, caplog):
    began = time.monotonic()  # which nobody sets back, unlike the time of a record
    caplog.set_level(logging.INFO, logger="outbox")
    sent = [a_message("orders", n, key=f"k{n % 20}" if n % 4 else None) for n in range(5_000)]
    failures: list[Unavailable] = []
    time.sleep(2)  # RabbitMQ 3.10 loses a quorum queue that was declared right before it is killed
    with (
        closing(RabbitSender(quorum.url, timeout=timedelta(seconds=1))) as sender,
        ThreadPoolExecutor(1) as pool,
    ):
        done = pool.submit(send_all, sender, sent, failures)
        time.sleep(0.2)
        fragile.kill()
        fragile.start()
        done.result(240)

    assert failures
    check_stored(quorum, sent)
    first, *outage, last = caplog.records
    assert {first.getMessage(), last.getMessage()} == {f"RabbitMQ: connected to {quorum.url.partition('/?')[0]}"}
    assert {record.levelname for record in outage} == {"WARNING"}
    assert len(outage) <= 1 + (time.monotonic() - began) / 60


def send_all(sender: RabbitSender, sent: list[Message], failures: list[Unavailable]) -> None:
    """Send in portions, each until all of it is done, as a worker does."""
    for start in range(0, len(sent), 200):
        part = sent[start : start + 200]
        while part:
            verdicts = sender.send(part)
            failures += [verdict for verdict in verdicts if isinstance(verdict, Unavailable)]
            part = [one for one, verdict in zip(part, verdicts, strict=True) if not isinstance(verdict, Done)]
            time.sleep(0.02 if part else 0)


def test_an_outage_is_told_in_few_words(exchange, caplog):
    caplog.set_level(logging.INFO)
    sent = [a_message("orders", n) for n in range(50)]
    with closing(RabbitSender(exchange.url)) as sender:
        check_all_done(sender.send(sent[:1]), sent[:1])
        caplog.clear()

        exchange.disappear()
        for _ in range(200):
            assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
        exchange.recover()

        check_eventually_done(sender, sent)
    address = exchange.url.partition("/?")[0]
    told = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith(f"WARNING RabbitMQ: {address}: ")
    assert told[1] == f"INFO RabbitMQ: connected to {address}"


def test_a_paused_server_is_unavailable_in_time_and_found_again(fragile, quorum):
    sent = [a_message("orders", bytes(100_000), key=f"k{n % 10}") for n in range(100)]
    with closing(RabbitSender(quorum.url, timeout=timedelta(seconds=1))) as sender:
        check_eventually_done(sender, sent[:10])

        with paused(fragile):
            for _ in range(3):
                began = time.monotonic()
                assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
                assert time.monotonic() - began < 10

        check_eventually_done(sender, sent)
    check_stored(quorum, sent)


def test_what_a_call_has_given_up_is_not_sent_later():
    """A server that was paused reads on. The operating system has some 4 MB for it by then, of 8."""
    first, sent = [a_message("orders", "first")], [a_message("orders", bytes(100_000)) for _ in range(80)]

    with (
        Witness() as witness,
        closing(RabbitSender(witness.url, timeout=timedelta(seconds=1))) as sender,
        ThreadPoolExecutor(1) as pool,
    ):
        verdicts = pool.submit(sender.send, first)
        witness.arrivals(1)
        witness.confirm()
        check_all_done(verdicts.result(), first)
        witness.pause()
        assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}

        assert witness.read_to_the_end() < 60


def test_a_server_whose_memory_is_full_is_unavailable_and_gets_few_copies(fragile, quorum):
    """It reads nothing more, until it has memory again, and then everything that any connection has sent."""
    sent = [a_message("orders", n, key=f"k{n % 10}") for n in range(100)]
    with closing(RabbitSender(quorum.url, timeout=timedelta(seconds=1.5))) as sender:
        check_all_done(sender.send(sent[:10]), sent[:10])

        with out_of_memory(fragile):
            for _ in range(10):
                verdicts = sender.send(sent)
                address = quorum.url.partition("/?")[0]
                blocked = f"RabbitMQ: {address} blocks publishers, because its memory or disk is full"
                assert verdicts[:10] == [Unavailable(blocked)] * 10
                assert {type(verdict) for verdict in verdicts} == {Unavailable}

        check_eventually_done(sender, sent)
    check_stored(quorum, sent)
    copies = Counter(one.message_id for one in quorum.stored())
    assert max(copies.values()) <= 3


def test_an_operator_may_close_all_connections(fragile, quorum):
    sent = [a_message("orders", n, key=f"k{n % 20}") for n in range(2_000)]
    failures: list[Unavailable] = []
    with closing(quorum.open()) as sender, ThreadPoolExecutor(1) as pool:
        done = pool.submit(send_all, sender, sent, failures)
        fragile.control("close_all_connections", "maintenance")
        done.result(30)
        rest = [a_message("orders", n, key=f"k{n % 20}") for n in range(2_000, 2_020)]
        check_eventually_done(sender, rest)

    check_stored(quorum, sent + rest)
    assert all("maintenance" in failure.error for failure in failures if failure.everything)


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_connection_may_be_cut_at_any_byte(exchange, direction: Direction, full):
    """In the greeting, the login, the opening of a channel, between messages and within them, and in confirmations."""
    cuts = [*range(0, 600, 1 if full else 3), *range(600, 4_000, 3 if full else 40)]
    sent: list[Message] = []
    failed = 0
    sender = exchange.open()
    for cut in cuts:
        if cut % 2 == 0:
            sender.close()  # so that the next call has to connect
        part = [a_message("orders", b"%d " % n * 20, key=f"k{n % 3}" if n % 2 else None) for n in range(10)]
        sent += part
        exchange.cut_after(cut, direction)
        verdicts = sender.send(part)
        exchange.recover()
        left = [one for one, verdict in zip(part, verdicts, strict=True) if not isinstance(verdict, Done)]
        if left:
            failed += 1
            check_eventually_done(sender, left)

    sender.close()
    check_stored(exchange, sent)
    assert failed > len(cuts) / 8  # many cuts lie behind the end of a short answer


def test_a_repetition_has_the_same_id_and_the_same_bytes(exchange, publisher):
    """The first answer is lost after the server has stored the message."""
    first, sent = a_message("orders", 1), a_message("orders", {"n": 2}, key="k", tags="t", headers={"a": "b"})
    check_all_done(publisher.send([first]), [first])

    exchange.lose_next_answer()
    [lost] = publisher.send([sent])
    exchange.recover()
    again = publisher.send([sent])

    assert isinstance(lost, Unavailable)
    assert again == [DONE]
    _, one, other = exchange.received()
    assert (one.message_id, one.body, one.headers) == (str(sent.message_id), sent.body, other.headers)
    assert one.properties.marshal() == other.properties.marshal()
    assert one.body == other.body


def test_bad_weather_loses_and_reorders_nothing(exchange, full):
    """Connections are refused, silent or cut at random."""
    sender = RabbitSender(exchange.url, timeout=timedelta(seconds=0.5))
    sent: list[Message] = []
    failures: list[Unavailable] = []

    with ThreadPoolExecutor(1) as pool:
        storm = pool.submit(rage, exchange, seconds=60 if full else 5)
        while not storm.done():
            part = [a_message("orders", len(sent) + n, key=f"k{n % 20}" if n % 4 else None) for n in range(200)]
            sent += part
            send_all(sender, part, failures)
        storm.result()

    sender.close()
    check_stored(exchange, sent)
    assert failures


def rage(exchange: Exchange, *, seconds: float) -> None:
    """Break something every now and then, and mend it."""
    chance = random.Random(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chance.choice((exchange.disappear, exchange.fall_silent, exchange.lose_next_answer))()
        time.sleep(chance.uniform(0, 1))
        exchange.recover()
        time.sleep(chance.uniform(0, 0.5))


def test_another_server_of_the_address_is_taken(exchange, rabbitmq):
    with TcpProxy("127.0.0.1", rabbitmq.port) as refusing, TcpProxy("127.0.0.1", rabbitmq.port) as silent:
        refusing.refuse()
        silent.black_hole()
        hosts = f"127.0.0.1:{refusing.port},127.0.0.1:{silent.port},127.0.0.1:{rabbitmq.port}"
        for n in range(6):
            with closing(RabbitSender(f"amqp://{hosts}/?exchange={exchange.name}&timeout=4")) as sender:
                check_all_done(sender.send(sent := [a_message("orders", n)]), sent)


def test_big_bodies_go_through_in_one_call(exchange):
    sent = [a_message("orders", bytes(900_000), key=f"k{n % 5}" if n % 2 else None) for n in range(40)]
    with closing(RabbitSender(exchange.url)) as sender:
        check_all_done(sender.send(sent), sent)

    check_stored(exchange, sent)


def test_several_threads_may_send_at_once(exchange, publisher):
    calls = [[a_message("orders", n, key=f"{call}-{n % 3}") for n in range(100)] for call in range(8)]

    with ThreadPoolExecutor(8) as pool:
        for verdicts, sent in zip(pool.map(publisher.send, calls), calls, strict=True):
            check_all_done(verdicts, sent)

    check_stored(exchange, [message for sent in calls for message in sent])


def test_the_fault_of_one_call_is_not_that_of_another(exchange, publisher):
    """Each call has a channel of its own while it lasts: here the queue refuses some topics of every second call."""
    exchange.take("orders")
    calls = [[a_message(["orders", "odrers"][n % 2], n, key=f"{call}-{n}") for n in range(100)] for call in range(8)]

    with ThreadPoolExecutor(8) as pool:
        for verdicts, sent in zip(pool.map(publisher.send, calls), calls, strict=True):
            assert [verdict == DONE for verdict in verdicts] == [one.topic == "orders" for one in sent]


def test_closing_ends_a_call_that_waits(exchange):
    sender = RabbitSender(exchange.url, timeout=timedelta(seconds=30))
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    exchange.fall_silent()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.send, [a_message("orders", 2)])
        time.sleep(0.2)
        began = time.monotonic()
        sender.close()
        assert [type(verdict) for verdict in waiting.result(60)] == [Unavailable]
    assert time.monotonic() - began < 15


def test_closing_ends_a_call_that_connects(exchange):
    sender = RabbitSender(exchange.url, timeout=timedelta(seconds=30))
    exchange.fall_silent()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.send, [a_message("orders", 2)])
        time.sleep(0.2)
        began = time.monotonic()
        sender.close()
        assert [type(verdict) for verdict in waiting.result(60)] == [Unavailable]
    assert time.monotonic() - began < 15


def test_closing_leaves_no_thread_behind(exchange):
    before = threading.active_count()
    sender = exchange.open()
    sender.send([a_message("orders", 1)])
    assert threading.active_count() > before

    sender.close()

    assert threading.active_count() == before


def test_a_closed_sender_begins_anew(exchange, publisher):
    publisher.close()

    check_all_done(publisher.send(sent := [a_message("orders", 1)]), sent)


SCRIPT = """
import os, sys
from outbox.model.message import Message
from outbox.senders.rabbitmq import RabbitSender
from outbox.model.verdict import DONE

def send():
    assert list(sender.send([Message("orders", b"x", key="k") for _ in range(20)])) == [DONE] * 20

def wait(pid):
    assert os.waitpid(pid, 0)[1] == 0

sender = RabbitSender(sys.argv[1])
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
def test_a_process_may_fork_and_end_as_it_likes(exchange, rest, sent):
    """Each process has a connection of its own, and none has a word to say at its end."""
    command = [sys.executable, "-W", "default", "-c", SCRIPT + rest, exchange.url]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(exchange.received()) == sent


def test_outages_leave_nothing_behind(exchange, publisher):
    """Connections that failed do not pile up, nor do tasks."""
    check_all_done(publisher.send(sent := [a_message("orders", 1)]), sent)
    before = len(list(Path("/proc/self/fd").iterdir()))

    for n in range(6):
        (exchange.disappear, exchange.fall_silent)[n % 2]()
        publisher.send([a_message("orders", bytes(10_000)) for _ in range(100)])
        exchange.recover()
        check_eventually_done(publisher, [a_message("orders", 2)])

    assert eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 1)
