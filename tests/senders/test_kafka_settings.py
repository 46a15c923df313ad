"""What a user may set of Kafka's client: nothing that a promise rests on, and nothing that the URL says already."""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError

from outbox.errors import SenderError
from outbox.model.verdict import Unavailable
from outbox.senders.address import Address
from outbox.senders.kafka import KafkaSender
from outbox.senders.kafka_refusals import words_of
from outbox.senders.kafka_settings import _GUARDED, OPTIONS, Settings
from outbox.senders.port import destination_of
from outbox.testing.sender_contract import a_message
from tests.support.waiting import eventually

SECRET = "s3cr3t-of-the-shop"


def settings_of(url: str, token: Callable[[], Any] | None = None, **further: Any) -> Settings:
    """What the client gets; further settings with _ in place of dots."""
    address = Address.of(url, form="kafka://host", options=OPTIONS)
    given = {name.replace("_", "."): value for name, value in further.items()}
    return Settings(address, further=given, token=token, seconds=5)


def test_further_settings_go_to_the_client_beside_our_own():
    settings = settings_of("kafkas://b:9092,a", linger_ms=50, client_id="shop", socket_keepalive_enable=True)

    assert settings.connecting() == {
        "bootstrap.servers": "b:9092,a",
        "security.protocol": "SSL",
        "client.id": "shop",
        "log_level": 2,
        "linger.ms": 50,
        "socket.keepalive.enable": True,
    }
    assert settings.producing(streams=False) == settings.connecting() | {
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": "murmur2_random",
        "allow.auto.create.topics": False,
        "topic.metadata.propagation.max.ms": 0,
        "message.max.bytes": 16 * 1024 * 1024,
        "delivery.timeout.ms": 4000,
    }


def test_a_login_may_be_a_setting():
    login: dict[str, Any] = {"sasl.username": "ann", "sasl.password": SECRET, "sasl.mechanisms": "PLAIN"}

    found = settings_of("kafkas://h", **login).connecting()

    assert (found["security.protocol"], found["sasl.username"], found["sasl.password"]) == ("SASL_SSL", "ann", SECRET)


@pytest.mark.parametrize("name", _GUARDED)
def test_what_a_promise_rests_on_is_refused_with_the_reason(name):
    with pytest.raises(SenderError) as refused:
        KafkaSender("kafka://h", settings={name: SECRET})

    assert str(refused.value) == f"kafka://h: settings: leave out {name}; {_GUARDED[name]}"


@pytest.mark.parametrize(
    ("url", "settings", "text"),
    [
        ("kafka://h", {"request.required.acks": 1}, "leave out request.required.acks; a message is done only when "),
        ("kafka://h", {"message.timeout.ms": 1}, "leave out message.timeout.ms; the timeout of the sender"),
        ("kafka://h", {"max.in.flight": 6}, "Failed to create producer: `max.in.flight` must be set <= 5"),
        ("kafka://h", {"retries": 0}, "Failed to create producer: `retries` must be set >= 1"),
        ("kafka://h", {"nonsense": SECRET}, 'No such configuration property: "nonsense"'),
        ("kafka://h", {"sasl.mechanism": SECRET}, "Failed to create producer: Unsupported SASL mechanism: …"),
        (
            "kafka://h",
            {"sasl.username": "ann", "sasl.password": SECRET},
            "sasl.username needs sasl.mechanism, too: PLAIN",
        ),
        ("kafka://h", {"linger.ms": 1, "queue.buffering.max.ms": 2}, "leave out queue.buffering.max.ms; another name"),
        ("kafka://h", {"error_cb": print}, "error_cb must be a text, a number or a boolean"),
        ("kafka://h", {"error_cb": SECRET}, "expected error_cb property as a callable function"),
        ("kafka://h", {"linger.ms": 4000}, "Failed to create producer: `message.timeout.ms` must be greater than"),
        ("kafka://h", {"ssl.key.password": SECRET}, "ssl.… is for kafkas://"),
        ("kafkas://h", {"ssl.key.pem": SECRET}, "Failed to create producer: ssl.key.pem failed: "),
        ("kafkas://ann:pass@h", {"sasl.mechanisms": "PLAIN"}, "leave out sasl.mechanisms; the URL says it"),
        ("kafka://h?compression=lz4", {"compression.codec": "lz4"}, "leave out compression.codec; the URL says it"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_and_no_value_is_told(url, settings, text):
    with pytest.raises(SenderError) as refused:
        KafkaSender(url, settings=settings)

    shown = url.replace("ann:pass@", "").partition("?")[0]
    assert str(refused.value).startswith(f"{shown}: settings: {text}")
    assert SECRET not in str(refused.value)


def test_values_are_shown_nowhere_and_make_no_other_destination():
    settings = {"sasl.username": "ann", "sasl.password": SECRET, "sasl.mechanism": "PLAIN"}
    with closing(KafkaSender("kafkas://h/shop", settings=settings)) as sender:
        assert SECRET not in repr(sender) + repr(vars(sender)) + repr(vars(sender._settings)["_tls"])
        assert destination_of(sender) == "kafkas://h/shop"


def test_the_client_gets_the_token_that_was_asked_for_before_and_later_another():
    """Without a token at hand, the client would wait for ten seconds."""
    tokens = [(f"t{n}", time.time() + 600, "ann", {"a": "b"}) for n in range(3)]
    given = iter(tokens)
    settings = settings_of("kafkas://h", lambda: next(given))

    found = settings.connecting()

    assert (found["sasl.mechanism"], found["security.protocol"]) == ("OAUTHBEARER", "SASL_SSL")
    assert [found["oauth_cb"](None) for _ in tokens] == tokens


def _fails() -> Any:
    raise OSError(f"https://ann:{SECRET}@issuer refused password={SECRET}")


@pytest.mark.parametrize("option", ["", "?transactional.id=relay"])
@pytest.mark.parametrize(
    ("token", "text"),
    [
        (_fails, "the function of token failed: OSError: https://…@issuer refused password=…"),
        (lambda: SECRET, "token must return a text and its expiry in seconds since 1970"),
        (lambda: (SECRET, "tomorrow"), "token must return a text and its expiry in seconds since 1970"),
        (lambda: (SECRET, time.time() - 1), "the function of token returned a token that has expired"),
        (lambda: (SECRET, time.time() * 1000), "the expiry of a token is in seconds since 1970, not in milliseconds"),
    ],
)
def test_without_a_token_everything_waits_and_the_reason_is_told(token, text, option, caplog):
    with closing(KafkaSender(f"kafkas://127.0.0.1:1{option}", token=token)) as sender:
        [verdict] = sender.send([a_message("orders", 1)])

    assert verdict == Unavailable(f"Kafka: kafkas://127.0.0.1:1: {text}")
    assert verdict.everything
    assert SECRET not in caplog.text


@pytest.mark.storm
@pytest.mark.parametrize("option", ["", "&transactional.id=relay"])
def test_a_function_that_hangs_holds_up_no_call_and_is_not_called_again(option):
    """Its late token is for the next call."""
    over = threading.Event()

    def hang() -> tuple[str, float]:
        over.wait(240)
        return "t", time.time() + 600

    with closing(KafkaSender(f"kafkas://127.0.0.1:1?timeout=1{option}", token=hang)) as sender:
        verdicts = [sender.send([a_message("orders", 1)])[0] for _ in range(2)]
        threads = [thread.name for thread in threading.enumerate()].count("outbox-token")
        over.set()

        assert eventually(lambda: "token" not in repr(sender.send([a_message("orders", 1)])))

    text = "the function of token has not returned in time; let the function give up earlier"
    assert verdicts == [Unavailable(f"Kafka: kafkas://127.0.0.1:1: {text}")] * 2
    assert threads == 1


def test_an_alert_of_tls_is_told_without_the_codes_of_openssl():
    alert = "error:0A000412:SSL routines::ssl/tls alert bad certificate: SSL alert number 42"
    error = KafkaError(KafkaError._SSL, f"ssl://h:9093/bootstrap: Receive failed: {alert} (after 1ms)")

    said = "ssl://h:9093/bootstrap: the broker refuses the handshake of TLS: bad certificate (after 1ms)"
    assert words_of(error) == said


@pytest.mark.parametrize("url", ["kafkas://ann:pass@h", "kafkas://h?mechanism=plain"])
def test_a_token_is_the_only_login(url):
    with pytest.raises(SenderError, match="token is the login; leave out user, password and mechanism"):
        KafkaSender(url, token=lambda: ("t", time.time() + 60))
