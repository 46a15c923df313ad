"""The settings of Kafka's topics under which a topic drops or refuses messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka.admin import AdminClient, ConfigResource

from outbox.senders.kafka_refusals import CLIENT_LOG
from outbox.senders.port import Doubt, Stored


def doubts_about(settings: dict[str, Any], topics: Mapping[str, Stored], seconds: float) -> list[Doubt]:
    """Ask for the settings of those topics that are there, and return the doubts."""
    admin = AdminClient(settings, logger=CLIENT_LOG)
    there = admin.list_topics(timeout=seconds).topics
    known = [topic for topic in topics if topic in there]
    if not known:
        return []
    asked = admin.describe_configs(
        [ConfigResource(ConfigResource.Type.TOPIC, topic) for topic in known], request_timeout=seconds
    )
    found: list[Doubt] = []
    for resource, answer in asked.items():
        values = {name: entry.value for name, entry in answer.result(seconds).items()}
        copies = min((len(each.replicas) for each in there[resource.name].partitions.values()), default=1)
        found += doubts_of(resource.name, values, copies, topics[resource.name])
    return found


def doubts_of(topic: str, settings: Mapping[str, str], copies: int, stored: Stored) -> Iterator[Doubt]:
    """Yield the doubts about a topic. `copies`: the fewest replicas of a partition."""
    where = f"Kafka topic {topic}"
    if "compact" in settings.get("cleanup.policy", ""):
        change = "set cleanup.policy=delete, or keep to keyed messages of which the last one counts"
        yield Doubt(where, "cleanup.policy=compact: of each key only the last message is kept", change)
        if stored.keyless:
            problem = f"cleanup.policy=compact refuses messages without a key, and the log has {stored.keyless} of them"
            yield Doubt(where, problem, "set cleanup.policy=delete, or give each message a key")
    least = int(settings.get("min.insync.replicas", 1))
    if least > copies:
        problem = f"min.insync.replicas={least} with {copies} replicas refuses all messages"
        yield Doubt(where, problem, f"set min.insync.replicas to less than {copies + 1}, or add replicas")
    elif least < 2 <= copies:
        problem = f"min.insync.replicas={least}: a message counts as stored with one copy, and is lost with that broker"
        yield Doubt(where, problem, "set min.insync.replicas=2")
    largest = int(settings.get("max.message.bytes", stored.largest))
    if stored.largest > largest:
        problem = f"max.message.bytes={largest} refuses messages, and the log has a body of {stored.largest} bytes"
        yield Doubt(where, problem, "raise max.message.bytes, or send smaller bodies")
