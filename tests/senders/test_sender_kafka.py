"""Kafka: the contract, over a network that fails; and what a message looks like on its way."""

import base64
import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from outbox.errors import SenderError
from outbox.model.encoding import Tombstone
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.senders.kafka import KafkaSender, read_message
from outbox.senders.opening import open_sender
from outbox.testing.sender_contract import SenderContract, a_message, check_all_done, check_eventually_done
from outbox.testing.servers.process import free_port
from tests.support.authority import Authority, options
from tests.support.kafka_topics import PATIENCE, FarKafka, Topics
from tests.support.places import opened
from tests.support.servers.proxy import TcpProxy
from tests.support.tls import CERTIFICATE, FOREIGN, KEY

sender = opened("topics")


class TestKafkaSender(SenderContract):
    """Kafka passes the contract."""

    @pytest.fixture
    def destination(self, topics, request):
        """Topics of each test's own. Unless an outage is waited for, a call may take long on a busy machine."""
        if not {"gone", "silent"}.intersection(request.node.name.split("_")):
            topics.seconds = 30.0
        return topics


def test_the_fields_of_a_message_travel_as_documented_headers(topics, sender):
    headers = {"X-Trace": "a: b", "name": "Zoë"}
    sent = a_message("alpha", b"{}", key="order 7: ü%", tags="x/y", headers=headers, content_type="application/json")
    sent.created_at = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)

    check_all_done(sender.send([sent]), [sent])

    [record] = topics.records()
    assert (record.topic(), record.key(), record.value()) == (f"{topics.prefix}.alpha", "order 7: ü%".encode(), b"{}")
    assert dict(record.headers()) == {
        "X-Trace": b"a: b",
        "name": "Zoë".encode(),
        "Outbox-Id": str(sent.message_id).encode(),
        "Outbox-Tags": b"x%2Fy",
        "Outbox-Created-At": b"2026-01-31T12:00:00.123456+00:00",
        "Content-Type": b"application/json",
    }


def test_a_field_that_a_message_has_not_is_not_sent(topics, sender):
    sent = Message("alpha", b"")

    check_all_done(sender.send([sent]), [sent])

    [record] = topics.records()
    assert (record.key(), record.value()) == (None, b""), "null would be a tombstone"
    assert record.headers() == [("Outbox-Id", str(sent.message_id).encode())]


@pytest.mark.parametrize("options", ["", "?transactional.id=tombstones"], ids=["plain", "in transactions"])
def test_a_tombstone_is_a_null_and_is_read_back(topics, options):
    sent = Message("alpha", Tombstone(), key="a")
    with closing(open_sender(f"{topics.url}{options}")) as sender:
        check_all_done(sender.send([sent]), [sent])

    [record] = topics.committed("alpha")
    read = read_message(record, prefix=topics.prefix)
    assert (record.key(), record.value(), read.is_tombstone, read.body) == (b"a", None, True, b"")


def test_a_consumer_reads_the_message_back(topics, sender):
    sent = a_message("alpha", {"id": 7}, key="a b", tags="x", headers={"n": "v"})
    sender.send([sent])

    message = read_message(topics.records()[0], prefix=topics.prefix)

    assert (message.message_id, message.topic, message.key, message.tags) == (sent.message_id, "alpha", "a b", "x")
    assert (message.headers, message.body, message.content_type) == ({"n": "v"}, b'{"id":7}', "application/json")
    assert (message.created_at, message.id) == (sent.created_at, None)


def test_binary_headers_of_others_are_left_out(kafka, topics, sender):
    """As those of a framework that puts a record into a dead-letter topic."""
    sent = a_message("alpha", 1, headers={"n": "v"})
    sender.send([sent])
    [first] = topics.records()
    foreign = [("kafka_dlt-original-partition", b"\x00\x00\x00\x07"), ("digest", b"\xff\xfe"), ("nothing", None)]
    producer = Producer({"bootstrap.servers": kafka.server.servers})
    producer.produce(f"{topics.prefix}.beta", first.value(), headers=[*first.headers(), *foreign])
    assert producer.flush(PATIENCE) == 0

    copy = next(record for record in topics.records() if record.topic() == f"{topics.prefix}.beta")

    assert (read_message(copy).message_id, read_message(copy).headers) == (sent.message_id, {"n": "v"})


def test_what_no_outbox_wrote_is_not_read_as_a_message(kafka, topics):
    producer = Producer({"bootstrap.servers": kafka.server.servers})
    producer.produce(f"{topics.prefix}.alpha", b"hello")
    assert producer.flush(PATIENCE) == 0

    with pytest.raises(KeyError, match="Outbox-Id"):
        read_message(topics.records()[0])


def test_a_key_is_in_the_partition_that_javas_clients_choose(topics, sender):
    """Numbers from Kafka's own tests of murmur2, for three partitions: (hash & 0x7fffffff) % 3."""
    hashes = {"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536}
    sent = [a_message("alpha", 1, key=key) for key in hashes]

    check_all_done(sender.send(sent), sent)

    found = {record.key().decode(): record.partition() for record in topics.records()}
    assert found == {key: (hash & 0x7FFFFFFF) % 3 for key, hash in hashes.items()}


def test_a_missing_topic_is_named_stops_only_itself_and_is_never_created(topics, sender):
    sent = [a_message(topic, n) for n, topic in enumerate(["alpha", "odrers", "beta"] * 10)]

    for _ in range(2):
        verdicts = sender.send(sent)
        missing = Unavailable(f"Kafka has no topic '{topics.prefix}.odrers'; create it")
        assert verdicts == [DONE, missing, DONE] * 10
    assert {record.topic() for record in topics.records()} == {f"{topics.prefix}.alpha", f"{topics.prefix}.beta"}


def test_a_topic_that_is_made_later_is_found(topics, sender):
    sent = [a_message("later", 1)]
    assert [type(verdict) for verdict in sender.send(sent)] == [Unavailable]

    topics.make("later")

    # Less than the half minute after which the client looks by itself.
    check_eventually_done(sender, sent, seconds=20)


def test_a_topic_that_the_client_has_found_missing_waits_alone(topics, sender, monkeypatch):
    """The client then takes no record of it, and so reports none."""

    class Knowing(Producer):
        def produce(self, topic, *arguments, **more):
            if topic.endswith(".beta"):
                raise KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC))
            super().produce(topic, *arguments, **more)

    monkeypatch.setattr("outbox.senders.kafka.Producer", Knowing)

    verdicts = sender.send([a_message("alpha", 1), a_message("beta", 2), a_message("alpha", 3)])

    assert verdicts == [DONE, Unavailable(f"Kafka has no topic '{topics.prefix}.beta'; create it"), DONE]


def test_a_topic_that_kafka_cannot_have_waits_for_a_line_of_configuration(sender, topics):
    [refused, long] = sender.send([a_message("a|b", 1), a_message("x" * 249, 2)])

    rule = "a name has letters, digits, ., - and _, at most 249"
    fix = 'write in the route of outbox.toml: rename = {"a|b" = "a-b"}'
    assert refused == Unavailable(f"Kafka has no topic '{topics.prefix}.a|b': {rule}; {fix}")
    assert long.error.endswith(f'rename = {{"{"x" * 249}" = "{"x" * (248 - len(topics.prefix))}"}}')


def test_a_message_above_its_topics_limit_is_rejected_and_those_beside_it_are_not(topics, sender):
    """The client puts messages together, and the broker refuses them together."""
    topics.make("narrow", max_message_bytes="5000")
    sent = [a_message("narrow", b"x" * (6_000 if n in (3, 40) else 300), key=f"k{n}") for n in range(60)]

    verdicts = sender.send(sent)

    what, do = "the topic's max.message.bytes of 5000", "raise that setting, or send a smaller body"
    too_large = [
        Reject(f"Kafka on topic '{topics.prefix}.narrow': a record of {size} bytes is larger than {what}; {do}")
        for size in (6_096, 6_097)  # the body, the key, and headers
    ]
    assert [n for n, verdict in enumerate(verdicts) if verdict != DONE] == [3, 40]
    assert [verdicts[3], verdicts[40]] == too_large
    assert len(topics.records()) == 58


def test_an_unkeyed_record_of_a_compacted_topic_is_rejected_alone(topics, sender):
    topics.make("compact", partitions=1, cleanup_policy="compact")
    sent = [a_message("compact", n, key=f"k{n}" if n else None) for n in range(4)]

    verdicts = sender.send(sent)

    assert [type(verdict) for verdict in verdicts] == [Reject, type(DONE), type(DONE), type(DONE)]


SECRET = "p@ss:w/rd?#% 512"
USERS = "org.apache.kafka.common.security.{}.{}LoginModule required {};"


class Strict(NamedTuple):
    """A broker that lets in who has a password, a certificate or a token, each at a port of its own.

    ann and her certificate may write to the topic `allowed` behind the prefix, and nobody to `secret`. `cert` and
    `token` are the ways to the ports for a certificate, which trusts one authority only, and for a token.
    """

    far: FarKafka
    prefix: str
    cert: TcpProxy
    token: TcpProxy
    trusted: Authority


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strict]:
    """That broker. ann has another password at the port with TLS."""
    accounts = 'user_ann="p@ss:w/rd?#%" user_admin="admin"'
    trusted = Authority(tmp_path_factory.mktemp("kafka") / "authority")
    protocols = "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,FAR:SASL_PLAINTEXT,SAFE:SASL_SSL,CERT:SSL,TOKEN:SASL_SSL"
    settings = {
        "listener.security.protocol.map": protocols,
        "listener.name.far.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.far.plain.sasl.jaas.config": USERS.format("plain", "Plain", accounts),
        "listener.name.cert.ssl.client.auth": "required",
        "listener.name.cert.ssl.truststore.type": "PEM",
        "listener.name.cert.ssl.truststore.location": str(trusted.ca),
        "ssl.principal.mapping.rules": "RULE:^CN=(.*)$/$1/",
        "listener.name.token.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.token.oauthbearer.sasl.jaas.config": USERS.format(
            "oauthbearer", "OAuthBearer", 'unsecuredLoginStringClaim_sub="broker"'
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:admin",
    }
    ports = free_port(), free_port()
    with TcpProxy("127.0.0.1", ports[0]) as cert, TcpProxy("127.0.0.1", ports[1]) as token:
        listeners = {"CERT": (ports[0], cert.port), "TOKEN": (ports[1], token.port)}
        with FarKafka(settings, tls=(CERTIFICATE, KEY), users={"ann": SECRET}, listeners=listeners) as far:
            topics = Topics(far)
            topics.make("allowed", "secret")
            topics.allow("allowed", "ann")
            topics.close()
            yield Strict(far, topics.prefix, cert, token, trusted)


def url_of(strict: Strict, user: str, password: str) -> str:
    """The broker's URL for a user."""
    return f"kafka://{user}:{password}@127.0.0.1:{strict.far.proxy.port}/{strict.prefix}?timeout=30"


def test_a_forbidden_topic_stops_only_itself(strict):
    sender = KafkaSender(url_of(strict, "ann", "p%40ss%3Aw%2Frd%3F%23%25"))
    sent = [a_message("allowed", 1), a_message("secret", 2), a_message("allowed", 3)]

    verdicts = sender.send(sent)

    assert (verdicts[0], verdicts[2]) == (DONE, DONE)
    assert isinstance(verdicts[1], Unavailable)
    assert not verdicts[1].everything
    assert "uthorization failed" in verdicts[1].error
    sender.close()


def test_wrong_credentials_are_unavailable_and_never_told(strict, caplog):
    caplog.set_level(logging.DEBUG)
    sender = KafkaSender(url_of(strict, "ann", "s3cr3t"))

    [verdict] = sender.send([a_message("allowed", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.everything
    assert "SASL authentication error: Authentication failed" in verdict.error
    assert "s3cr3t" not in caplog.text + repr(verdict) + repr(sender) + repr(vars(sender))
    sender.close()


def safe_url_of(strict: Strict, password: str, certificate: Path = CERTIFICATE) -> str:
    """The broker's URL for ann, with TLS and SCRAM."""
    where = f"127.0.0.1:{strict.far.server.safe_port}/{strict.prefix}"
    return f"kafkas://ann:{quote(password, safe='')}@{where}?mechanism=scram-sha-512&timeout=30&ca={certificate}"


def test_a_password_goes_by_scram_through_tls(strict):
    with closing(KafkaSender(safe_url_of(strict, SECRET))) as sender:
        verdicts = sender.send([a_message("allowed", n) for n in range(3)])

    assert verdicts == [DONE] * 3


def test_a_wrong_password_is_refused_by_scram_and_never_told(strict, caplog):
    caplog.set_level(logging.DEBUG)
    with closing(KafkaSender(safe_url_of(strict, "s3cr3t"))) as sender:
        [verdict] = sender.send([a_message("allowed", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.everything
    assert "SASL authentication error: Authentication failed" in verdict.error
    assert "s3cr3t" not in caplog.text + repr(verdict) + repr(sender) + repr(vars(sender))


def test_a_certificate_that_is_not_trusted_is_refused_before_the_password_is_sent(strict, caplog):
    caplog.set_level(logging.DEBUG)
    with closing(KafkaSender(safe_url_of(strict, SECRET, FOREIGN))) as sender:
        [verdict] = sender.send([a_message("allowed", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.everything
    assert "certificate verify failed" in verdict.error
    assert SECRET not in caplog.text + repr(verdict)


def test_a_certificate_lets_in_also_after_an_outage_and_others_are_refused(strict, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    stranger = Authority(tmp_path / "stranger")
    (ann, key), bob, old = (strict.trusted.issue(*each) for each in (("ann",), ("bob",), ("old", -1)))
    url = f"kafkas://127.0.0.1:{strict.cert.port}/{strict.prefix}?ca={CERTIFICATE}&timeout=20&"

    check_found_again(KafkaSender(url + options(shown=(ann, key))), strict.cert)

    forbidden = verdict_of(KafkaSender(url + options(shown=bob)))
    assert forbidden == Unavailable(f"Kafka on topic '{strict.prefix}.allowed': Broker: Topic authorization failed")
    for query in ("", options(shown=stranger.issue("ann")), options(shown=old)):
        refused = verdict_of(KafkaSender(url + query))
        assert isinstance(refused, Unavailable)
        assert refused.everything
        assert refused.error.startswith(f"Kafka: kafkas://127.0.0.1:{strict.cert.port}: ")
    assert [line for line in key.read_text().splitlines()[1:-1] if line in caplog.text] == []


@pytest.mark.storm
def test_a_token_lets_in_also_after_an_outage_and_others_are_refused(strict, caplog):
    caplog.set_level(logging.DEBUG)
    url = f"kafkas://127.0.0.1:{strict.token.port}/{strict.prefix}?ca={CERTIFICATE}&timeout=20"

    check_found_again(KafkaSender(url, token=partial(a_token, "ann")), strict.token)

    forbidden = verdict_of(KafkaSender(url, token=partial(a_token, "bob")))
    assert forbidden == Unavailable(f"Kafka on topic '{strict.prefix}.allowed': Broker: Topic authorization failed")
    expired = verdict_of(KafkaSender(url, token=partial(a_token, "ann", age=3600)))
    assert isinstance(expired, Unavailable)
    assert expired.everything
    assert 'SASL authentication error: {"status":"invalid_token"}' in expired.error
    assert a_token("ann")[0][:20] not in caplog.text + repr(expired)


def a_token(user: str, *, age: float = 0.0) -> tuple[str, float]:
    """A token of an issuer that signs nothing, and a time in the future."""
    now = time.time()
    parts = {"alg": "none"}, {"sub": user, "iat": now - age, "exp": now - age + 600}
    encoded = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return f"{'.'.join(encoded)}.", now + 600


def check_found_again(sender: KafkaSender, proxy: TcpProxy) -> None:
    """Messages arrive, also after the broker was away."""
    with closing(sender):
        check_eventually_done(sender, [a_message("allowed", 1)])
        proxy.refuse()
        [away] = sender.send(sent := [a_message("allowed", 2)])
        proxy.pass_through()
        check_eventually_done(sender, sent)
    assert isinstance(away, Unavailable)


def verdict_of(sender: KafkaSender) -> Verdict:
    """The verdict on a message that may be written."""
    with closing(sender):
        [verdict] = sender.send([a_message("allowed", 1)])
    return verdict


def test_a_broker_that_is_not_there_is_told_at_once_and_by_name():
    sender = KafkaSender("kafka://127.0.0.1:1", timeout=timedelta(seconds=30))

    [verdict] = sender.send([a_message("alpha", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith("Kafka: kafka://127.0.0.1:1: ")
    assert "Connection refused" in verdict.error
    sender.close()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("kafka://", "kafka://: write kafka://host:9092,host2:9092 or kafkas://host:9092"),
        ("kafka://a/b%20c", "kafka://a/b%20c: the path is a prefix of topics, of letters, digits, - and _"),
        (
            "kafka://a?mechanism=md5",
            "kafka://a: mechanism must be one of plain, scram-sha-256, scram-sha-512",
        ),
        (
            "kafka://a?acks=0",
            (
                "kafka://a: its options are timeout, mechanism, compression, transactional.id, ca, cert, key, as,"
                " each once; 'acks' is none of them"
            ),
        ),
        (
            "kafka://a?mechanism=plain",
            "kafka://a: mechanism belongs to a login; write kafka://user:password@host:9092",
        ),
        ("kafka://:p@a", "kafka://a: a login has a user and a password; write kafka://user:password@host:9092"),
        ("kafkas://u@a", "kafkas://a: a login has a user and a password; write kafkas://user:password@host:9092"),
        ("kafka://a?ca=/etc/ca.pem", "kafka://a: ca is an option of kafkas://"),
        ("kafka://a?compression=x", "kafka://a: compression must be one of none, gzip, lz4, snappy, zstd"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url, text):
    with pytest.raises(SenderError) as caught:
        open_sender(url)

    assert str(caught.value) == text


def test_a_reader_of_committed_records_sees_them_at_once(kafka, topics, sender):
    sent = [a_message("alpha", n, key="k") for n in range(5)]
    check_all_done(sender.send(sent), sent)
    consumer = Consumer(
        {"bootstrap.servers": kafka.server.servers, "group.id": "x", "isolation.level": "read_committed"}
    )
    consumer.assign([TopicPartition(f"{topics.prefix}.alpha", number, 0) for number in range(3)])

    found = [each.value() for each in consumer.consume(5, timeout=PATIENCE)]

    assert found == [b"0", b"1", b"2", b"3", b"4"]
    consumer.close()
