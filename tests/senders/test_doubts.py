"""`outbox doctor --to` names the settings of a destination under which messages are dropped or refused."""

import json
from collections.abc import Iterator
from contextlib import closing

import pytest
from redis import Redis
from sqlalchemy import Engine

from outbox import Message, Outbox
from outbox.senders import jetstream
from outbox.senders.form import Form
from outbox.senders.kafka_doubts import doubts_of
from outbox.senders.nats import NatsSender
from outbox.senders.port import Doubt, Stored
from tests.support.command_line import outbox as typed
from tests.support.servers.redis import RedisServer

SOUND = {"cleanup.policy": "delete", "min.insync.replicas": "2", "max.message.bytes": "1048588"}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """A server whose settings the tests change."""
    with RedisServer() as server:
        yield server


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"appendfsync": "always", "maxmemory": "100mb", "maxmemory-policy": "noeviction"}, []),
        ({"appendfsync": "always", "maxmemory": "0", "maxmemory-policy": "allkeys-lru"}, []),
        ({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}, ["maxmemory-policy allkeys-lru evicts streams"]),
        ({"appendfsync": "everysec", "maxmemory": "0"}, ["appendfsync everysec: a crash of the machine loses"]),
        ({"appendonly": "no"}, ["appendonly is off: a crash loses all messages since the last snapshot"]),
    ],
)
def test_settings_of_redis_that_drop_messages_are_findings(sqlite_engine, redis, settings, told):
    with Redis.from_url(redis.url) as client:
        for name, value in ({"appendonly": "yes", "appendfsync": "always"} | settings).items():
            client.config_set(name, value)

    ended = typed(sqlite_engine, "doctor", "--to", redis.url)

    lines = [line for line in ended.out.splitlines() if line.startswith("redis://")]
    assert (len(lines), ended.code) == (len(told), 1 if told else 0), ended.out
    assert all(text in line for text, line in zip(told, lines, strict=True))


def test_a_destination_that_is_away_is_a_finding(sqlite_engine):
    ended = typed(sqlite_engine, "doctor", "--to", "redis://127.0.0.1:1")

    assert (ended.code, "redis://127.0.0.1:1: does not tell its settings" in ended.out) == (1, True), ended.out


@pytest.mark.parametrize(
    ("settings", "copies", "stored", "told"),
    [
        ({}, 3, Stored(10, 1), []),
        ({"min.insync.replicas": "1"}, 1, Stored(10, 0), []),
        ({"cleanup.policy": "compact"}, 3, Stored(10, 0), ["only the last message is kept"]),
        (
            {"cleanup.policy": "compact,delete"}, 3, Stored(10, 2),
            ["only the last message is kept", "refuses messages without a key, and the log has 2 of them"],
        ),
        ({"min.insync.replicas": "1"}, 3, Stored(10, 0), ["is lost with that broker"]),
        ({"min.insync.replicas": "2"}, 1, Stored(10, 0), ["with 1 replicas refuses all messages"]),
        ({}, 3, Stored(2_000_000, 0), ["=1048588 refuses messages, and the log has a body of 2000000"]),
    ],
)  # fmt: skip
def test_settings_of_a_topic_of_kafka_that_drop_or_refuse_messages_are_findings(settings, copies, stored, told):
    found = list(doubts_of("orders", SOUND | settings, copies, stored))

    assert len(found) == len(told)
    assert all(text in doubt.problem for text, doubt in zip(told, found, strict=True))


@pytest.mark.storm
def test_a_broker_tells_the_settings_of_its_topics_and_a_refusal_names_the_setting(pg_engine, topics):
    outbox = Outbox(pg_engine)
    with outbox.begin() as session:
        outbox.send(session, "compacted", b"1")
    topics.make("compacted", cleanup_policy="compact")

    ended = typed(pg_engine, "doctor", "--to", topics.url)
    with closing(topics.open()) as sender:
        [refused] = sender.send([Message("compacted", b"1")])

    assert "; a topic with cleanup.policy=compact takes no message without a key" in refused.error
    assert "refuses messages without a key, and the log has 1 of them" in ended.out


def info(consumers: int = 1, **config: object) -> bytes:
    """What JetStream answers to `STREAM.INFO`."""
    sound = {"name": "ORDERS", "retention": "limits", "storage": "file", "discard": "old", "max_msgs": -1}
    return json.dumps({"config": sound | config, "state": {"consumer_count": consumers}}).encode()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (info(), []),
        (info(max_age=10**9), []),
        (info(consumers=0), []),
        (info(retention="interest"), []),
        (info(max_msgs=1000, discard="new"), []),
        (info(consumers=0, retention="interest"), ["retention interest without any consumer: each message is dropped"]),
        (info(storage="memory"), ["storage memory: a restart of the server loses all messages"]),
        (info(max_msgs=9, max_bytes=9), ["discard old with max_msgs and max_bytes: a full stream drops its oldest"]),
        (b'{"error": {"code": 404}}', []),
        (b"no JSON", []),
    ],
)
def test_settings_of_a_stream_that_drop_messages_are_findings(answer, told):
    found = jetstream.doubts_of(answer)

    assert len(found) == len(told)
    assert all(text in doubt.problem for text, doubt in zip(told, found, strict=True))


def test_a_server_of_nats_tells_the_settings_of_the_stream_that_takes_the_topics(sqlite_engine, stream):
    """No stream takes the second topic."""
    write(sqlite_engine, "orders", "bills")
    stream.take("orders", max_msgs=1000)

    ended = typed(sqlite_engine, "doctor", "--to", stream.url)

    problem = "discard old with max_msgs: a full stream drops its oldest messages, read or not"
    assert (ended.out.partition(";")[0], ended.code) == (f"stream {stream.prefix}: {problem}", 1)


@pytest.mark.storm
def test_a_server_of_rabbitmq_tells_that_a_queue_is_transient_and_makes_none(sqlite_engine, exchange):
    """The storm is the start of the server."""
    url = exchange.url.partition("?")[0]
    kinds = {"sound": {"durable": True}, "lossy": {"durable": False}, "passing": {"durable": True, "auto_delete": True}}
    quorum = {"voted": {"durable": True, "arguments": {"x-queue-type": "quorum"}}}
    write(sqlite_engine, *kinds, *quorum, "absent")
    for name, kind in (kinds | quorum).items():
        exchange.make_queue(name, **kind)

    ended = typed(sqlite_engine, "doctor", "--to", url)

    assert [line.partition(":")[0] for line in ended.out.splitlines() if line.startswith("queue")] == [
        "queue lossy",
        "queue passing",
    ]
    assert exchange.has_queue("absent") is False
    for name in kinds | quorum:
        exchange.remove_queue(name)


def test_topics_are_asked_for_under_the_names_of_their_routes(sqlite_engine, tmp_path, monkeypatch):
    """Of a settings file; topics of a route to another destination are not asked for."""
    asked: list[dict[str, Stored]] = []

    def note(_: NatsSender, topics: dict[str, Stored]) -> list[Doubt]:
        asked.append(topics)
        return []

    monkeypatch.setattr(NatsSender, "doubts", note)
    write(sqlite_engine, "orders", "bills", "mail", "parcels")
    settings = tmp_path / "outbox.toml"
    settings.write_text(
        '[routes.mail]\nto = "stdout:"\n[routes.bills]\nto = "nats://h:4222"\nprefix = "x."\n'
        '[routes."*"]\nto = "nats://h:4222"\nrename = {orders = "placed-orders"}\n'
    )

    ended = typed(sqlite_engine, "doctor", "--to", "nats://h:4222", "--config", str(settings))

    assert asked == [{"x.bills": Stored(1, 1)}, {"placed-orders": Stored(1, 1), "parcels": Stored(1, 1)}]
    assert ended.code == 0, ended.out


def test_topics_that_become_one_are_asked_for_together():
    form = Form(rename={"orders": "all", "bills": "all"}, prefix=None, envelope="raw")

    assert form.stored({"orders": Stored(5, 1), "bills": Stored(9, 2), "mail": Stored(1, 0)}) == {
        "all": Stored(9, 3),
        "mail": Stored(1, 0),
    }


def write(engine: Engine, *topics: str) -> None:
    outbox = Outbox(engine)
    with outbox.begin() as session:
        for topic in topics:
            outbox.send(session, topic, b"1")
