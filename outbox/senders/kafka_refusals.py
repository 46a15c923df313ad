"""Refusals of Kafka, and the verdicts for the messages."""

from __future__ import annotations

import logging
import re
from functools import lru_cache

from confluent_kafka import KafkaError, KafkaException

from outbox.model.message import Message
from outbox.model.verdict import Reject, Unavailable, Verdict
from outbox.senders.headers import wire_headers

#: What the client itself says. Its errors also come as events, of which the verdicts and the sender's own lines tell.
CLIENT_LOG = logging.getLogger("outbox.senders.kafka.client")
#: More than a body and headers can take, so that the topic's own limit counts.
LARGEST_RECORD = 16 * 1024 * 1024

#: What the client raises. While it raises a fatal error it also calls our functions, which ends in a SystemError.
CLIENT_ERRORS = (KafkaException, SystemError)
#: Errors that a whole batch of records gets although one of them may be the cause.
ONE_OF_A_BATCH = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG)
NO_SUCH_TOPIC = (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION)
#: Events that say that no broker can be reached, or that none lets this user in.
NO_BROKER = (KafkaError._ALL_BROKERS_DOWN, KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._RESOLVE)

_MOST_TOPIC = 249
#: The client calls it an error when this sender ends a stream on purpose, after a record that was refused.
_ON_PURPOSE = "Gap-less ordering would not be guaranteed"
_TOPIC = re.compile(r"[A-Za-z0-9._-]+")


# An application has few topics for very many messages.
@lru_cache(maxsize=1024)
def refusal_of(topic: str) -> str | None:
    """Return why Kafka cannot have a topic, if so."""
    if _TOPIC.fullmatch(topic) and len(topic) <= _MOST_TOPIC and topic not in (".", ".."):
        return None
    return (
        f"Kafka has no topic {topic!r:.300}: a name has letters, digits, ., - and _, at most {_MOST_TOPIC};"
        " send the message under another topic, and discard this one"
    )


def no_topic(topic: str) -> Verdict:
    """Return the verdict on a message of a missing topic."""
    return Unavailable(f"Kafka has no topic {topic!r}; create it")


def verdict_of_record(topic: str, error: KafkaError) -> Verdict | None:
    """Return the verdict on a record that is at fault, or the record's topic; else None."""
    text = f"Kafka on topic {topic!r}: {error.str()}"
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return Reject(f"{text}; raise the topic's max.message.bytes, or send a smaller body")
    if error.code() in NO_SUCH_TOPIC:
        return no_topic(topic)
    if error.code() in ONE_OF_A_BATCH or error.code() == KafkaError.TOPIC_EXCEPTION:
        return Reject(text)
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return Unavailable(text)
    return None


def too_large_for_the_client(message: Message) -> Reject:
    """Return the verdict on a record above the sender's own limit."""
    headers = wire_headers(message, keyed=False)
    key = len((message.key or "").encode())
    size = len(message.body) + key + sum(len(name) + len(value) for name, value in headers.items())
    return Reject(f"Kafka cannot carry it: {size} bytes are more than this sender's {LARGEST_RECORD}")


def _is_news(record: logging.LogRecord) -> bool:
    return _ON_PURPOSE not in record.getMessage()


CLIENT_LOG.addFilter(_is_news)
