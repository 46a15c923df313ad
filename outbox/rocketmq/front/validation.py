"""Checks of names and messages, in the order and in the words of RocketMQ's server."""

from __future__ import annotations

from outbox.errors import MQClientError
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.rocketmq.limits import checked_name_of_topic


def checked_topic(topic: str) -> str:
    """Return the name of a topic for clients."""
    try:
        return checked_name_of_topic(topic)
    except MQClientError as error:
        raise RefusedError(Code.ILLEGAL_TOPIC, str(error)) from error
