"""NATS JetStream: the contract, over a network that fails; and what a message looks like on its way."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from urllib.parse import quote

import pytest

from outbox.model.limits import MAX_HEADER_BYTES
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders.nats import NatsSender, read_message
from outbox.testing.sender_contract import SenderContract, a_message, check_all_done
from outbox.testing.servers import NatsServer
from tests.support.nats_streams import Witness, make_stream
from tests.support.remote import a_full_message
from tests.support.stand_ins import Eavesdropper

USERS = """{ users: [
  { user: ann, password: "pass", permissions: { publish: { deny: "Secret" } } }
  { user: bob, password: "p@ss:w/rd?#%" }
] }"""


FIX = "send the message anew without that, and discard this one"


@pytest.fixture(scope="module")
def strict() -> Iterator[NatsServer]:
    """A server with users, and with a low limit."""
    with NatsServer(settings={"authorization": USERS, "max_payload": "5000"}) as server:
        make_stream(server.url, "orders", "Secret", user="ann", password="pass")
        yield server


class TestNatsSender(SenderContract):
    """JetStream passes the contract."""

    @pytest.fixture
    def destination(self, stream):
        """A stream of its own for each test."""
        return stream


def url_of(server: NatsServer, *credentials: str) -> str:
    """The server's URL for a user with a password, or for a token."""
    return server.url.replace("//", f"//{':'.join(quote(one, safe='') for one in credentials)}@")


def test_the_fields_of_a_message_travel_as_documented_headers(stream, sender):
    sent = a_full_message()

    check_all_done(sender.send([sent]), [sent])

    [received] = stream.received()
    assert received.subject == f"{stream.prefix}.orders"
    assert received.data == b"{}"
    assert received.headers == {
        "Nats-Msg-Id": str(sent.message_id),
        "Outbox-Key": "order%207%3A%20%C3%BC%25",
        "Outbox-Tags": "placed%2Fp%C3%A4id",
        "Outbox-Created-At": "2026-01-31T14:00:00.123456+00:00",
        "Content-Type": "application/json",
        "X-Trace": "a: b",
        "name": "Zoë",
    }


def test_a_field_that_a_message_has_not_is_not_sent(stream, sender):
    sent = Message("orders", b"")

    check_all_done(sender.send([sent]), [sent])

    assert stream.received()[0].headers == {"Nats-Msg-Id": str(sent.message_id)}


def test_a_consumer_reads_the_message_back(stream, sender):
    sent = a_message("orders", {"id": 7}, key="a b", tags="x", headers={"n": "v"})
    sender.send([sent])

    message = read_message(stream.received()[0], prefix=stream.prefix)

    assert (message.message_id, message.topic, message.key, message.tags) == (sent.message_id, "orders", "a b", "x")
    assert (message.headers, message.body, message.content_type) == ({"n": "v"}, b'{"id":7}', "application/json")
    assert (message.created_at, message.id) == (sent.created_at, None)


def test_headers_that_servers_add_on_the_way_are_left_out(stream, sender):
    """As those of a stream that has another one as its source, or that republishes."""
    sender.send([a_message("orders", 1, headers={"n": "v"})])
    [received] = stream.received()
    received.headers |= {
        "Nats-Stream-Source": "SHOP 7 > >",
        "Nats-Sequence": "7",
        "no token": "x",
        "big": "x" * (MAX_HEADER_BYTES + 1),
    }
    received.headers |= {f"X-{n}": "x" for n in range(100)}

    headers = read_message(received, prefix=stream.prefix).headers

    assert headers == {"n": "v"} | {f"X-{n}": "x" for n in range(100)}


def test_what_no_outbox_wrote_is_not_read_as_a_message(stream):
    stream.publish("orders", b"hello")

    with pytest.raises(KeyError, match="Nats-Msg-Id"):
        read_message(stream.received()[0])


def test_a_second_copy_is_dropped_by_the_stream(stream, sender):
    sent = [a_message("orders", n) for n in range(3)]

    check_all_done(sender.send(sent), sent)
    check_all_done(sender.send(sent), sent)

    assert len(stream.received()) == 3


def test_a_missing_stream_is_named_and_stops_only_its_topic(stream, sender):
    stream.take("orders", "mail")
    sent = [a_message(topic, n) for n, topic in enumerate(["orders", "odrers", "mail"] * 10)]

    verdicts = sender.send(sent)

    missing = Unavailable(f"no JetStream stream takes subject '{stream.prefix}.odrers'; create one")
    assert verdicts == [DONE, missing, DONE] * 10


def test_an_answer_that_is_not_of_jetstream_is_not_done(nats):
    with Witness(nats) as witness, ThreadPoolExecutor(1) as pool:
        sender = NatsSender(witness.url, timeout=timedelta(seconds=60))
        verdicts = pool.submit(sender.send, [a_message("echo", 1)])
        witness.arrivals(1)
        witness.answer(b"thank you")

        [verdict] = verdicts.result()
        sender.close()

    assert verdict == Unavailable(f"NATS: what answers on subject '{witness.prefix}.echo' is not JetStream")


def test_a_full_stream_is_unavailable(stream, sender):
    stream.take("orders", max_msgs=2, discard="new")

    verdicts = sender.send([a_message("orders", n) for n in range(3)])

    assert verdicts[:2] == [DONE, DONE]
    assert verdicts[2] == Unavailable(
        f"JetStream on subject '{stream.prefix}.orders': maximum messages exceeded (10077)"
    )


def test_a_message_above_its_streams_limit_is_rejected(stream, sender):
    stream.take("orders", max_msg_size=1000)

    verdicts = sender.send([a_message("orders", b"x" * 100), a_message("orders", b"x" * 1001)])

    assert verdicts[0] == DONE
    assert verdicts[1] == Reject(
        f"JetStream on subject '{stream.prefix}.orders': message size exceeds maximum allowed (10054)"
    )


@pytest.mark.parametrize("topic", [".a", "a.", "a..b"])
def test_a_topic_that_is_no_subject_waits_for_a_line_of_configuration(sender, topic):
    rule = "what stands between dots has to be letters, digits, - and _, and not empty"
    fix = f'write in the route of outbox.toml: rename = {{"{topic}" = "{topic.strip(".").replace("..", ".")}"}}'

    assert sender.send([a_message(topic, 1)]) == [Unavailable(f"NATS has no subject {topic!r}: {rule}; {fix}")]


def test_a_header_that_clients_take_for_their_own_is_rejected(stream, sender):
    sent = [a_message("orders", 1, headers={"Status": "paid"}), a_message("orders", 2, headers={"My-Status": "paid"})]

    refused, done = sender.send(sent)

    assert refused == Reject(f"headers['Status']: the name is reserved by NATS; {FIX}")
    assert done == DONE


def test_the_servers_max_payload_counts_headers(strict):
    """A server ends the connection at one byte too many: the sender has to know before."""
    sender = NatsSender(url_of(strict, "ann", "pass"))
    headers = len("NATS/1.0\r\n\r\n") + len("Nats-Msg-Id: ") + 36 + len("\r\n")
    fits, exceeds = Message("orders", b"x" * (5_000 - headers)), Message("orders", b"x" * (5_001 - headers))

    verdicts = sender.send([exceeds, fits, Message("orders", b"small")])

    reason = "5001 bytes with headers are more than the server's max_payload of 5000"
    assert verdicts == [Reject(reason), DONE, DONE]
    sender.close()


def test_a_forbidden_subject_stops_only_its_topic_and_at_once(strict):
    sender = NatsSender(url_of(strict, "ann", "pass"), timeout=timedelta(seconds=120))
    sent = [
        a_message(topic, n, key=key)
        for n, (topic, key) in enumerate([("orders", "a"), ("Secret", "a"), ("orders", "a"), ("orders", "b")])
    ]
    began = time.monotonic()

    verdicts = sender.send(sent)

    assert time.monotonic() - began < sender.deadline.total_seconds() / 2
    forbidden = Unavailable("NATS: the user may not publish to 'Secret'")
    waiting = Unavailable("an earlier message of its key was not stored")
    assert verdicts == [DONE, forbidden, waiting, DONE]
    sender.close()


def test_credentials_may_hold_any_character(strict):
    sender = NatsSender(url_of(strict, "bob", "p@ss:w/rd?#%"))

    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    sender.close()


def test_a_name_alone_is_a_token():
    with NatsServer(settings={"authorization": '{ token: "t@k/n" }'}) as server:
        make_stream(server.url, "orders", token="t@k/n")
        sender = NatsSender(url_of(server, "t@k/n"))

        check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
        sender.close()


def test_wrong_credentials_are_unavailable_and_never_told(strict, caplog):
    caplog.set_level(logging.DEBUG)
    sender = NatsSender(url_of(strict, "ann", "s3cr3t"))

    [verdict] = sender.send([a_message("orders", 1)])

    expected = f"NATS: nats://127.0.0.1:{strict.port}: nats: 'Authorization Violation'"
    assert verdict == Unavailable(expected)
    assert "s3cr3t" not in caplog.text + repr(verdict) + repr(sender) + repr(vars(sender))
    sender.close()


def test_a_server_without_tls_gets_no_credentials_over_a_tls_url():
    greeting = b'INFO {"version": "2.11.0", "max_payload": 1048576, "auth_required": true}\r\n'
    with Eavesdropper(greeting) as server:
        sender = NatsSender(f"tls://ann:s3cr3t@127.0.0.1:{server.port}", timeout=timedelta(seconds=60))
        [verdict] = sender.send([a_message("orders", 1)])
        sender.close()

    assert verdict == Unavailable(f"NATS: tls://127.0.0.1:{server.port}: nats: secure connection not available")
    assert b"s3cr3t" not in server.heard
