"""What Kafka refuses, and the verdict that this means."""

from __future__ import annotations

import re
from functools import lru_cache

from confluent_kafka import KafkaError, KafkaException

from outbox.model.verdict import Reject, Unavailable, Verdict

#: What the client raises. While it raises a fatal error it also calls our functions, which ends in a SystemError.
CLIENT_ERRORS = (KafkaException, SystemError)
#: Errors that a whole batch of records gets although one of them may be the cause.
ONE_OF_A_BATCH = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG)
NO_SUCH_TOPIC = (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION)
#: Events that say that no broker can be reached, or that none lets this user in.
NO_BROKER = (KafkaError._ALL_BROKERS_DOWN, KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._RESOLVE)

_MOST_TOPIC = 249
_TOPIC = re.compile(r"[A-Za-z0-9._-]+")


# An application has few topics for very many messages.
@lru_cache(maxsize=1024)
def refusal_of(topic: str) -> str | None:
    """Return the reason why Kafka cannot have a topic; None if it can."""
    if _TOPIC.fullmatch(topic) and len(topic) <= _MOST_TOPIC and topic not in (".", ".."):
        return None
    return (
        f"Kafka has no topic {topic!r:.300}: it has to be of letters, digits, ., - and _, at most {_MOST_TOPIC};"
        " send it under another topic, and discard this one"
    )


def no_topic(topic: str) -> Verdict:
    """Return the verdict on a message whose topic is not there."""
    return Unavailable(f"Kafka has no topic {topic!r}; create it")


def verdict_of_record(topic: str, error: KafkaError) -> Verdict | None:
    """Return the verdict on a record that was refused for its own sake, or for that of its topic; else None."""
    text = f"Kafka on topic {topic!r}: {error.str()}"
    if error.code() in NO_SUCH_TOPIC:
        return no_topic(topic)
    if error.code() in ONE_OF_A_BATCH or error.code() == KafkaError.TOPIC_EXCEPTION:
        return Reject(text)
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return Unavailable(text)
    return None
