"""RocketMQ's own limits and texts, which are stricter than those of the log."""

from __future__ import annotations

import re
from datetime import timedelta

from outbox.errors import MQClientError
from outbox.model.message import TRANSACTION_ID, Message
from outbox.store.half_messages.half import CHECK_TIMES, GIVEN_UP_TOPIC, IMMUNITY

MAX_TOPIC, MAX_GROUP = 127, 255
#: RocketMQ's response code for a message that it refuses.
MESSAGE_ILLEGAL = 13
_NAME = r"^[%|a-zA-Z0-9_-]+$"
#: The half topic is refused for every message of an outbox.
_FORBIDDEN = {
    "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_OP_HALF_TOPIC", GIVEN_UP_TOPIC, "SELF_TEST_TOPIC",
    "OFFSET_MOVED_EVENT",
}  # fmt: skip
#: Properties that RocketMQ sets itself, by its `MessageConst`.
_RESERVED = (
    "KEYS", "TAGS", "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "TRAN_MSG", "PGROUP", "UNIQ_KEY",
    "ORIGIN_MESSAGE_ID", "RECONSUME_TIME", "MAX_RECONSUME_TIMES", "TRAN_PREPARED_QUEUE_OFFSET", "TIMER_DELAY_SEC",
    "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "TIMER_OUT_MS", TRANSACTION_ID, CHECK_TIMES,
)  # fmt: skip
_MOST_IMMUNITY_SECONDS = 10**9


def checked_group(group: str) -> str:
    """Return the name of a producer group; raise in RocketMQ's words if it would refuse the name."""
    if not isinstance(group, str) or not group.strip():
        raise MQClientError("the specified group is blank")
    if len(group) > MAX_GROUP:
        raise MQClientError(f"the specified group is longer than group max length {MAX_GROUP}.")
    if not re.fullmatch(_NAME, group):
        raise MQClientError(f"the specified group[{group!a:.260}] contains illegal characters, allowing only {_NAME}")
    if group == "DEFAULT_PRODUCER":
        raise MQClientError("producerGroup can not equal DEFAULT_PRODUCER, please specify another one.")
    return group


def require_message(message: object) -> Message:
    """Return a message; refuse anything else."""
    if not isinstance(message, Message):
        raise MQClientError("the message is null", MESSAGE_ILLEGAL)
    return message


def checked_immunity(message: Message) -> timedelta | None:
    """Refuse a message that cannot be part of a transaction, in RocketMQ's words.

    Return for how long no checker may ask about the transaction, if the message says so.
    """
    _check_topic(require_message(message).topic)
    if not message.body:
        raise MQClientError("the message body length is zero", MESSAGE_ILLEGAL)
    if message.dedup_key is not None:
        raise MQClientError("a message of a transaction has no dedup_key; its message_id is sent once", MESSAGE_ILLEGAL)
    headers = message.headers
    for name in _RESERVED:
        if name in headers:
            raise MQClientError(f"The Property<{name}> is used by system, input another please", MESSAGE_ILLEGAL)
    asked = headers.get(IMMUNITY)
    if asked is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", asked) or int(asked) > _MOST_IMMUNITY_SECONDS:
        raise MQClientError(
            f"{IMMUNITY} must be a decimal integer of seconds, 0 to {_MOST_IMMUNITY_SECONDS}, but is {asked!a:.60}",
            MESSAGE_ILLEGAL,
        )
    return timedelta(seconds=int(asked))


def _check_topic(topic: str) -> None:
    if len(topic) > MAX_TOPIC:
        raise MQClientError(f"The specified topic is longer than topic max length {MAX_TOPIC}.")
    if not re.fullmatch(_NAME, topic):
        raise MQClientError(f"The specified topic[{topic}] contains illegal characters, allowing only {_NAME}")
    if topic in _FORBIDDEN:
        raise MQClientError(f"Sending message to topic[{topic}] is forbidden.")
