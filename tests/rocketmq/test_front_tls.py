"""TLS of a front: on its port or on a second one, with a certificate that may be renewed."""

import ssl
from pathlib import Path

import grpc
import pytest

from outbox import Outbox, create_engine
from outbox.rocketmq.front import Front, Security
from outbox.rocketmq.front.protocol import RPCS, SERVICE
from outbox.rocketmq.front.routing import Place
from tests.rocketmq.fronts import bodies, listening, producing
from tests.support.authority import Authority
from tests.support.tls import CERTIFICATE, KEY
from tests.support.waiting import eventually

BOTH = Security(tls_cert=CERTIFICATE, tls_key=KEY, tls_listen="127.0.0.1:0")
ANYWHERE = "127.0.0.1:0"


def told(channel: grpc.Channel) -> tuple[str, int]:
    """The host and the port that a front tells a client."""
    rpc = RPCS["QueryRoute"]
    with channel:
        ask = channel.unary_unary(
            f"/{SERVICE}/QueryRoute", rpc.request.SerializeToString, rpc.response.FromString
        )  # fmt: skip
        answer = ask(rpc.request(topic={"name": "orders"}), metadata=[("x-mq-client-id", "raw")], timeout=60)
    (address,) = answer.message_queues[0].broker.endpoints.addresses
    return address.host, address.port


def trusting(place: Place | None) -> grpc.Channel:
    """A connection with TLS that trusts the certificate of the tests."""
    return grpc.secure_channel(str(place), grpc.ssl_channel_credentials(CERTIFICATE.read_bytes()))


@pytest.mark.parametrize(("options", "plain", "by_tls"), [
    ({}, None, None),
    ({"advertise": "lb:1"}, ("lb", 1), None),
    ({"security": Security(tls_cert=CERTIFICATE, tls_key=KEY, tls_listen=ANYWHERE, tls_advertise="lb:2")},
        None, ("lb", 2)),
])  # fmt: skip
def test_a_client_is_told_the_place_that_speaks_as_the_client_does(outbox, options, plain, by_tls):
    with listening(outbox, **{"security": BOTH} | options) as front:
        assert front.listening is not None
        assert front.listening_tls is not None
        answers = told(grpc.insecure_channel(str(front.listening))), told(trusting(front.listening_tls))
        places = [(place.host, place.port) for place in (front.listening, front.listening_tls)]

    assert answers == (plain or places[0], by_tls or places[1])


def test_the_official_client_sends_by_tls_and_another_one_without(outbox, official, monkeypatch):
    credentials = grpc.ssl_channel_credentials(CERTIFICATE.read_bytes())
    # The client trusts the authorities of the system, and no others.
    monkeypatch.setattr(grpc, "ssl_channel_credentials", lambda: credentials)
    message = official.Message()
    message.topic, message.body = "orders", b"1"
    with listening(outbox, security=BOTH) as front:
        configuration = official.ClientConfiguration(str(front.listening_tls), official.Credentials())
        producer = official.Producer(configuration, ["orders"], tls_enable=True)
        producer.startup()
        producer.send(message)
        producer.shutdown()
        with producing(official, front, "orders") as other:
            other.send(message)

    assert bodies(outbox, "orders") == [b"1", b"1"]


def test_with_a_certificate_and_no_second_place_the_only_place_speaks_tls(outbox):
    with listening(outbox, security=Security(tls_cert=CERTIFICATE, tls_key=KEY)) as front:
        assert told(trusting(front.listening_tls))[1] == getattr(front.listening, "port", None)
        with pytest.raises(grpc.RpcError):
            told(grpc.insecure_channel(str(front.listening)))


def test_a_renewed_certificate_is_shown_to_the_next_connection(sqlite_engine, tmp_path):
    authority = Authority(tmp_path / "authority")
    shown = [authority.issue(name) for name in ("old", "new")]
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_bytes(shown[0][0].read_bytes())
    key.write_bytes(shown[0][1].read_bytes())
    with listening(Outbox(sqlite_engine), security=Security(tls_cert=cert, tls_key=key)) as front:
        place = front.listening_tls
        assert place is not None

        def seen() -> str:
            return ssl.get_server_certificate((place.host, place.port)).strip()

        before = seen()
        cert.write_bytes(shown[1][0].read_bytes())  # and the key a moment later
        key.write_bytes(shown[1][1].read_bytes())

        assert eventually(lambda: seen() == pem(shown[1][0]))
    assert before == pem(shown[0][0])


def pem(file: Path) -> str:
    """The certificate in a file."""
    return file.read_text().strip()


@pytest.mark.parametrize(("options", "text"), [
    ({"tls_cert": CERTIFICATE}, "TLS wants both, a certificate and its private key"),
    ({"tls_cert": KEY, "tls_key": KEY}, "TLS: cert: the file holds no certificate"),
    ({"tls_cert": CERTIFICATE, "tls_key": CERTIFICATE}, "TLS: key: the file holds no private key"),
    ({"tls_cert": CERTIFICATE, "tls_key": KEY, "tls_listen": "0.0.0.0:1"}, "no client can connect to 0.0.0.0:1"),
    ({"tls_cert": CERTIFICATE, "tls_key": KEY, "tls_listen": "x"}, "a place is HOST:PORT"),
])  # fmt: skip
def test_a_mistake_about_tls_is_said_at_once(options, text):
    with pytest.raises(ValueError, match=text):
        Front(Outbox(create_engine("sqlite://")), topics={}, security=Security(**options))
