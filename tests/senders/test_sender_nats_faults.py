"""NATS JetStream in bad weather: the contract, several servers, and the order of a key."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from outbox.model.verdict import Unavailable
from outbox.senders.nats import NatsSender
from outbox.testing.sender_contract import a_message, check_all_done
from outbox.testing.servers import NatsServer
from tests.support.nats_streams import Stream, Witness
from tests.support.places import begun, placed
from tests.support.remote import UNFIT_HEADERS, RemoteSenderContract
from tests.support.servers.proxy import TcpProxy

fragile, mortal = begun(NatsServer), placed(Stream, "fragile")


class TestBadWeather(RemoteSenderContract):
    """The stream drops second copies, so each message is there once."""

    at = "stream"
    drops_copies = True
    unfit = (
        *UNFIT_HEADERS,
        ({"headers": '{"": "c"}'}, "headers['']: the name must be of letters, digits and -"),
        ({"headers": '{"a": "b\\r\\nNats-Msg-Id: c"}'}, "headers['a']: must be one line of UTF-8"),
        ({"topic": "a b"}, "NATS has no subject 'a b'"),
        ({"topic": "a\r\nPUB b 0"}, "NATS has no subject 'a\\r\\nPUB b 0'"),
        ({"content_type": "a\r\nb: c"}, "content_type: must be one line of UTF-8"),
        ({"key": "\ud800"}, "NATS cannot carry it: "),
    )


def test_at_most_one_message_of_a_key_is_unacknowledged(nats):
    """Seen from the other side: no second message of a key arrives before the first is acknowledged."""
    keys = ["a", "b", None, "a", None, "a", "b", None]
    sent = [a_message("orders", n, key=key) for n, key in enumerate(keys)]
    rounds = []

    with Witness(nats) as witness, ThreadPoolExecutor(1) as pool:
        sender = NatsSender(witness.url, timeout=timedelta(seconds=120))
        verdicts = pool.submit(sender.send, sent)
        for expected in (5, 2, 1):
            rounds.append(witness.arrivals(expected))
            witness.answer()
        check_all_done(verdicts.result(), sent)
        sender.close()

    assert rounds == [[b"0", b"1", b"2", b"4", b"7"], [b"3", b"6"], [b"5"]]


def test_not_everything_is_under_way_at_once(nats):
    with Witness(nats) as witness, ThreadPoolExecutor(1) as pool:
        sender = NatsSender(witness.url, timeout=timedelta(seconds=120))
        verdicts = pool.submit(sender.send, [a_message("orders", n) for n in range(2_000)])

        assert len(witness.arrivals(512)) == 512

        sender.close()
        assert {type(verdict) for verdict in verdicts.result()} == {Unavailable}


@pytest.mark.storm
def test_another_server_of_the_address_is_taken(stream, nats):
    with TcpProxy("127.0.0.1", nats.port) as refusing, TcpProxy("127.0.0.1", nats.port) as silent:
        refusing.refuse()
        silent.black_hole()
        hosts = f"127.0.0.1:{refusing.port},127.0.0.1:{silent.port},127.0.0.1:{nats.port}"
        for n in range(6):
            sender = NatsSender(f"nats://{hosts}/{stream.prefix}?timeout=4")
            check_all_done(sender.send(sent := [a_message("orders", n)]), sent)
            sender.close()
