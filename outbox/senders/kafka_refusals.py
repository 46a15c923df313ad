"""Refusals of Kafka, and the verdicts for the messages."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource

from outbox.model.message import Message
from outbox.model.verdict import Reject, Unavailable, Verdict
from outbox.senders.headers import wire_headers
from outbox.senders.new_topics import too_narrow

#: What the client itself says. Its errors also come as events, of which the verdicts and the sender's own lines tell.
CLIENT_LOG = logging.getLogger("outbox.senders.kafka.client")
#: More than a body and headers can take, so that the topic's own limit counts.
LARGEST_RECORD = 16 * 1024 * 1024
#: The verdict on a record above the topic's limit, until `TopicLimits` has put size and limit into the text.
TOO_LARGE = Reject("larger than the topic's max.message.bytes")

#: What the client raises. While it raises a fatal error it also calls our functions, which ends in a SystemError.
CLIENT_ERRORS = (KafkaException, SystemError)
#: Errors that a whole batch of records gets although one of them may be the cause.
ONE_OF_A_BATCH = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG)
NO_SUCH_TOPIC = (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION)
#: Events that say that no broker can be reached, or that none lets this user in.
NO_BROKER = (KafkaError._ALL_BROKERS_DOWN, KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._RESOLVE)

_MOST_TOPIC = 249
_ALERT = re.compile(r"\w[\w ]*: error:\w+:SSL routines:[^:]*:[\w/]+ alert ([a-z ]+): SSL alert number \d+")
#: The client calls it an error when this sender ends a stream on purpose, after a record that was refused.
_ON_PURPOSE = "Gap-less ordering would not be guaranteed"
#: A limit is asked for again after so long.
_LIMIT_SECONDS = 60.0
_SETTING = "max.message.bytes"
_TOPIC = re.compile(r"[A-Za-z0-9._-]+")
_OTHERS = re.compile(r"[^A-Za-z0-9._-]")


def words_of(error: KafkaError) -> str:
    """Return an event of the client for people, without the codes of OpenSSL."""
    return _ALERT.sub(r"the broker refuses the handshake of TLS: \1", error.str())


# An application has few topics for very many messages.
@lru_cache(maxsize=1024)
def refusal_of(prefix: str, topic: str) -> Verdict | None:
    """Return the verdict on a topic that Kafka cannot have behind the sender's prefix; None for others."""
    name = prefix + topic
    if _TOPIC.fullmatch(name) and len(name) <= _MOST_TOPIC and name not in (".", ".."):
        return None
    problem = f"Kafka has no topic {name!r:.300}: a name has letters, digits, ., - and _, at most {_MOST_TOPIC}"
    return too_narrow(topic, problem, _OTHERS.sub("-", topic)[: _MOST_TOPIC - len(prefix)])


def no_topic(topic: str) -> Verdict:
    """Return the verdict on a message of a missing topic."""
    return Unavailable(f"Kafka has no topic {topic!r}; create it")


def verdict_of_record(topic: str, error: KafkaError) -> Verdict | None:
    """Return the verdict on a record that is at fault, or the record's topic; else None."""
    text = f"Kafka on topic {topic!r}: {error.str()}"
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return TOO_LARGE
    if error.code() in NO_SUCH_TOPIC:
        return no_topic(topic)
    if error.code() == KafkaError.INVALID_RECORD:
        return Reject(f"{text}; a topic with cleanup.policy=compact takes no message without a key")
    if error.code() in ONE_OF_A_BATCH or error.code() == KafkaError.TOPIC_EXCEPTION:
        return Reject(text)
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return Unavailable(text)
    return None


def too_large_for_the_client(message: Message) -> Reject:
    """Return the verdict on a record above the sender's own limit."""
    return Reject(f"Kafka cannot carry it: {_size_of(message)} bytes are more than this sender's {LARGEST_RECORD}")


class TopicLimits:
    """Tells the size of a record that is too large, and the limit of the topic."""

    def __init__(self, settings: Callable[[], Mapping[str, Any]], prefix: str) -> None:
        self._settings = settings
        self._prefix = prefix
        self._found: dict[str, tuple[float, str | None]] = {}

    def explain(self, messages: Sequence[Message], verdicts: list[Verdict], until: float) -> list[Verdict]:
        """Return the verdicts, with size and limit in each `TOO_LARGE`."""
        for index, verdict in enumerate(verdicts):
            if verdict is TOO_LARGE:
                verdicts[index] = self._verdict_on(messages[index], until)
        return verdicts

    def _verdict_on(self, message: Message, until: float) -> Reject:
        topic = self._prefix + message.topic
        limit = self._limit_of(topic, until)
        return Reject(
            f"Kafka on topic {topic!r}: a record of {_size_of(message)} bytes is larger than the topic's {_SETTING}"
            f"{'' if limit is None else f' of {limit}'}; raise that setting, or send a smaller body"
        )

    def _limit_of(self, topic: str, until: float) -> str | None:
        """Return the setting of a topic; None without the right to read settings, or without an answer in time."""
        now = time.monotonic()
        asked_at, limit = self._found.get(topic, (now - _LIMIT_SECONDS, None))
        if now - asked_at < _LIMIT_SECONDS:
            return limit
        try:
            admin = AdminClient(dict(self._settings()), logger=CLIENT_LOG)
            topics = [ConfigResource(ConfigResource.Type.TOPIC, topic)]
            [found] = admin.describe_configs(topics, request_timeout=max(0.1, until - now)).values()
            limit = found.result(max(0.1, until - now))[_SETTING].value
        except Exception:  # a text without the number is good enough
            limit = None
        self._found[topic] = now, limit
        return limit


def _size_of(message: Message) -> int:
    """Return about how many bytes a record has: body, key and headers."""
    headers = wire_headers(message, keyed=False)
    key = len((message.key or "").encode())
    return len(message.body) + key + sum(len(name) + len(value) for name, value in headers.items())


def _is_news(record: logging.LogRecord) -> bool:
    return _ON_PURPOSE not in record.getMessage()


CLIENT_LOG.addFilter(_is_news)
