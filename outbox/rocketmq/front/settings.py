"""Settings: a client asks, and the front answers with RocketMQ's numbers."""

from __future__ import annotations

from datetime import timedelta

from outbox.model.encoding import MAX_BODY_BYTES
from outbox.model.limits import DELAY_LEVELS
from outbox.rocketmq.front.protocol import Wire, kind, numbers, set_duration
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.store.fronts.groups import ConsumerGroup

_Settings = kind("Settings")
_TYPES = numbers("ClientType")
PRODUCER = _TYPES["PRODUCER"]
_CONSUMERS = (_TYPES["PUSH_CONSUMER"], _TYPES["SIMPLE_CONSUMER"])
_LITE = (_TYPES["LITE_PUSH_CONSUMER"], _TYPES["LITE_SIMPLE_CONSUMER"])

#: RocketMQ's own numbers.
SEND_ATTEMPTS = 3
_FIRST_PAUSE, _LONGEST_PAUSE, _TIMES = timedelta(milliseconds=10), timedelta(seconds=1), 2
MOST_RECEIVED = 32
LONG_POLL = timedelta(seconds=20)
CONSUME_ATTEMPTS = 17
#: Clients make no topic where there are so many, and name no more.
MOST_TOPICS = 10_000


class UnknownSettingsError(Exception):
    """The settings are of no kind of client; RocketMQ ends the stream."""


def topics_of(asked: Wire) -> frozenset[str]:
    """Return the topics in the settings of a client.

    Raises:
        RefusedError: there are too many.
    """
    topics, entries = asked.publishing.topics, asked.subscription.subscriptions
    if max(len(topics), len(entries)) > MOST_TOPICS:
        raise RefusedError(Code.BAD_REQUEST, f"too many topics, max is {MOST_TOPICS}")
    if asked.HasField("publishing"):
        return frozenset(topic.name for topic in topics)
    return frozenset(entry.topic.name for entry in entries)


def answered(asked: Wire, group: ConsumerGroup | None = None) -> Wire:
    """Return the settings for a client: the client's own, with RocketMQ's numbers.

    `group`: the row of a consumer's group; None without a row.

    Raises:
        UnknownSettingsError: the client says neither what it publishes nor what it subscribes to, or has no known type.
        RefusedError: the client is for lite topics.
    """
    if asked.client_type in _LITE:
        raise RefusedError(Code.NOT_IMPLEMENTED, "lite topics are not there")
    made = _Settings()
    made.CopyFrom(asked)
    if asked.HasField("publishing") and asked.client_type == PRODUCER:
        _set_publishing(made)
    elif asked.HasField("subscription") and asked.client_type in _CONSUMERS:
        _set_subscription(made, group)
    else:
        raise UnknownSettingsError("settings have publishing or subscription, and a known client type")
    # Clients read the flag only if the field is present.
    made.metric.on = False
    return made


def _set_publishing(made: Wire) -> None:
    made.publishing.max_body_size = MAX_BODY_BYTES
    made.publishing.validate_message_type = True
    made.backoff_policy.max_attempts = SEND_ATTEMPTS
    backoff = made.backoff_policy.exponential_backoff
    set_duration(backoff.initial, _FIRST_PAUSE)
    set_duration(backoff.max, _LONGEST_PAUSE)
    backoff.multiplier = _TIMES


def _set_subscription(made: Wire, group: ConsumerGroup | None) -> None:
    made.subscription.fifo = group is not None and group.ordered
    made.subscription.receive_batch_size = MOST_RECEIVED
    set_duration(made.subscription.long_polling_timeout, LONG_POLL)
    made.backoff_policy.max_attempts = CONSUME_ATTEMPTS if group is None else group.attempts
    pauses = made.backoff_policy.customized_backoff.next
    del pauses[:]
    for level in DELAY_LEVELS.values():
        set_duration(pauses.add(), level)
