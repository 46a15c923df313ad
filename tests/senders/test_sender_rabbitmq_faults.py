"""RabbitMQ in bad weather: the contract, a server that fills up or closes connections, and the order of a key."""

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Unavailable
from outbox.senders.rabbitmq import RabbitSender
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done, check_stored
from tests.support.places import begun, placed
from tests.support.rabbit_exchanges import Exchange, Witness, out_of_memory
from tests.support.remote import UNFIT_HEADERS, RemoteSenderContract
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.rabbitmq import RabbitServer

QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}

fragile = begun(RabbitServer)
quorum = placed(partial(Exchange, **QUORUM), "fragile")


@pytest.fixture
def mortal(quorum: Exchange) -> Exchange:
    """The exchange with the quorum queue; RabbitMQ 3.10 loses a queue that was declared right before it is killed."""
    time.sleep(2)
    return quorum


class TestBadWeather(RemoteSenderContract):
    """Its server needs long to come back."""

    at = "exchange"
    kills = 1
    full_cuts = (*range(600), *range(601, 2_000, 3))
    unfit = (
        *UNFIT_HEADERS,
        ({"headers": '{"": "c"}'}, "headers['']: the name must be of letters, digits and -"),
        ({"headers": '{"a": "b\\r\\nc"}'}, "headers['a']: must be one line of UTF-8"),
        ({"headers": json.dumps({"a" * 129: "b"})}, f"headers['{'a' * 79}]: the name must be at most 128 characters"),
        ({"headers": json.dumps({"a": "b" * 200_000})}, "headers: must be at most 131072 bytes on the wire"),
        ({"topic": "a b"}, "topic: must be 1 to 249 characters of"),
        ({"topic": ""}, "topic: must be 1 to 249 characters of"),
        ({"topic": "\ud800"}, "topic: holds a lone surrogate"),
        ({"topic": "a" * 250}, "topic: must be 1 to 249 characters of"),
        ({"content_type": "a\r\nb: c"}, "content_type: must be one line of UTF-8"),
        ({"content_type": "a" * 300}, "RabbitMQ cannot carry it: "),
        ({"key": "\ud800"}, "RabbitMQ cannot carry it: "),
        ({"tags": "\ud800"}, "RabbitMQ cannot carry it: "),
        ({"created_at": datetime(1950, 1, 1, tzinfo=UTC)}, "RabbitMQ cannot carry it: "),
        ({"message_id": "no id"}, "RabbitMQ cannot carry it: "),
    )


def opened(witness: Witness) -> closing[RabbitSender]:
    """A sender that waits for the witness, however busy the machine is."""
    return closing(RabbitSender(witness.url, timeout=timedelta(seconds=120)))


def test_at_most_one_message_of_a_key_is_unconfirmed():
    """Seen from the other side: no second message of a key arrives before the first is confirmed."""
    keys = ["a", "b", None, "a", None, "a", "b", None]
    sent = [a_message("orders", n, key=key) for n, key in enumerate(keys)]
    rounds = []

    with Witness() as witness, opened(witness) as sender, ThreadPoolExecutor(1) as pool:
        verdicts = pool.submit(sender.send, sent)
        for expected in (5, 2, 1):
            rounds.append(witness.arrivals(expected))
            witness.confirm(at_once=expected == 5)
        check_all_done(verdicts.result(), sent)

    assert rounds == [[b"0", b"1", b"2", b"4", b"7"], [b"3", b"6"], [b"5"]]


def test_what_is_refused_by_one_frame_is_not_done():
    sent = [a_message("orders", n, key=key) for n, key in enumerate(["a", "b", None, "a"])]

    with Witness() as witness, opened(witness) as sender, ThreadPoolExecutor(1) as pool:
        verdicts = pool.submit(sender.send, sent)
        witness.arrivals(3)
        witness.refuse()
        refused = Unavailable("RabbitMQ: a queue for routing key 'orders' refused it; it may be full")
        assert verdicts.result() == [refused] * 3 + [Unavailable("an earlier message of its key was not stored")]


def test_not_everything_is_under_way_at_once():
    with Witness() as witness, opened(witness) as sender, ThreadPoolExecutor(1) as pool:
        verdicts = pool.submit(sender.send, [a_message("orders", n) for n in range(2_000)])

        assert len(witness.arrivals(512)) == 512

        sender.close()
        assert verdicts.result() == [Unavailable("RabbitMQ: the sender was closed")] * 2_000


def test_a_connection_that_the_server_closes_is_lost_with_the_servers_words():
    with Witness() as witness, opened(witness) as sender, ThreadPoolExecutor(1) as pool:
        verdicts = pool.submit(sender.send, [a_message("orders", 1)])
        witness.arrivals(1)
        witness.close_connection(320, "CONNECTION_FORCED - shutdown")

        address = witness.url.partition("/?")[0]
        lost = f"RabbitMQ: {address}: CONNECTION_FORCED - shutdown"
        assert verdicts.result() == [Unavailable(lost)]


def send_all(sender: RabbitSender, sent: list[Message], failures: list[Unavailable]) -> None:
    """Send in portions, each until all of it is done, as a worker does."""
    for start in range(0, len(sent), 200):
        part = sent[start : start + 200]
        while part:
            verdicts = sender.send(part)
            failures += [verdict for verdict in verdicts if isinstance(verdict, Unavailable)]
            part = [one for one, verdict in zip(part, verdicts, strict=True) if not isinstance(verdict, Done)]
            time.sleep(0.02 if part else 0)


@pytest.mark.storm
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


@pytest.mark.storm
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

        send_all(sender, sent, [])
    check_stored(quorum, sent)
    copies = Counter(one.message_id for one in quorum.stored())
    assert max(copies.values()) <= 3


@pytest.mark.storm
def test_an_operator_may_close_all_connections(fragile, quorum):
    sent = [a_message("orders", n, key=f"k{n % 20}") for n in range(2_000)]
    failures: list[Unavailable] = []
    with closing(quorum.open()) as sender, ThreadPoolExecutor(1) as pool:
        done = pool.submit(send_all, sender, sent, failures)
        fragile.control("close_all_connections", "maintenance")
        done.result(60)
        rest = [a_message("orders", n, key=f"k{n % 20}") for n in range(2_000, 2_020)]
        check_eventually_done(sender, rest)

    check_stored(quorum, sent + rest)
    assert all("maintenance" in failure.error for failure in failures if failure.everything)


@pytest.mark.storm
def test_another_server_of_the_address_is_taken(exchange, rabbitmq):
    with TcpProxy("127.0.0.1", rabbitmq.port) as refusing, TcpProxy("127.0.0.1", rabbitmq.port) as silent:
        refusing.refuse()
        silent.black_hole()
        hosts = f"127.0.0.1:{refusing.port},127.0.0.1:{silent.port},127.0.0.1:{rabbitmq.port}"
        for n in range(6):
            with closing(RabbitSender(f"amqp://{hosts}/?exchange={exchange.name}&timeout=4")) as sender:
                check_all_done(sender.send(sent := [a_message("orders", n)]), sent)


def test_the_fault_of_one_call_is_not_that_of_another(exchange, publisher):
    """Each call has a channel of its own while it lasts: here the queue refuses some topics of every second call."""
    exchange.take("orders")
    calls = [[a_message(["orders", "odrers"][n % 2], n, key=f"{call}-{n}") for n in range(100)] for call in range(8)]

    with ThreadPoolExecutor(8) as pool:
        for verdicts, sent in zip(pool.map(publisher.send, calls), calls, strict=True):
            assert [verdict == DONE for verdict in verdicts] == [one.topic == "orders" for one in sent]
