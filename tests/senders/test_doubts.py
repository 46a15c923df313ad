"""`outbox doctor --to` names the settings of a destination under which messages are dropped or refused."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from redis import Redis

from outbox import Message, Outbox
from outbox.senders.kafka_doubts import doubts_of
from outbox.senders.port import Stored
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
