"""Checks of names and messages, in the order and in the words of RocketMQ's server."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from outbox.errors import MQClientError
from outbox.model.encoding import MAX_BODY_BYTES
from outbox.rocketmq.front.protocol import Wire, duration_of, moment_of, numbers
from outbox.rocketmq.front.statuses import Code, RefusedError, internal
from outbox.rocketmq.limits import checked_consumer_group, checked_name_of_topic, checked_transaction_id

#: RocketMQ's own limits.
MAX_PROPERTIES, MAX_PROPERTY_BYTES = 128, 16384
MAX_GROUP_BYTES = 64
MAX_DELAY, MAX_RECOVERY = timedelta(days=1), timedelta(hours=1)
#: For the time of a message in the hands of a client.
_LEAST_INVISIBLE, _MOST_INVISIBLE = timedelta(seconds=10), timedelta(hours=12)
_MILLISECOND = timedelta(milliseconds=1)
#: Properties that RocketMQ sets itself, by its `MessageConst`.
RESERVED = frozenset({
    "1ST_POP_TIME", "ARRIVE_TIME", "BORN_HOST", "BORN_TIMESTAMP", "BUYER_ID", "CLUSTER", "CONSUME_START_TIME",
    "CORRECTION_FLAG", "CORRELATION_ID", "DELAY", "DUP_INFO", "EXTEND_UNIQ_INFO", "INNER_MULTI_DISPATCH",
    "INNER_MULTI_QUEUE_OFFSET", "INSTANCE_ID", "KEYS", "MAX_OFFSET", "MAX_RECONSUME_TIMES", "MESSAGE_TYPE",
    "MIN_OFFSET", "MQ2_FLAG", "MSG_REGION", "ORIGIN_MESSAGE_ID", "PGROUP", "POP_CK", "POP_CK_OFFSET",
    "PUSH_REPLY_TIME", "REAL_QID", "REAL_TOPIC", "RECONSUME_TIME", "REPLY_TO_CLIENT", "RETRY_TOPIC", "TAGS",
    "TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS", "TRACE_ON", "TRANSFER_FLAG", "TRAN_MSG",
    "TRAN_PREPARED_QUEUE_OFFSET", "TTL", "UNIQ_KEY", "WAIT",
})  # fmt: skip

_TRANSACTION = numbers("MessageType")["TRANSACTION"]
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def checked_topic(topic: str) -> str:
    """Return the name of a topic for clients."""
    try:
        return checked_name_of_topic(topic)
    except MQClientError as error:
        raise RefusedError(Code.ILLEGAL_TOPIC, str(error)) from error


def type_of(message: Wire) -> str:
    """Return the type of a message by its properties: a message says only of a transaction itself."""
    system = message.system_properties
    if system.message_type == _TRANSACTION:
        return "TRANSACTION"
    if system.HasField("delivery_timestamp"):
        return "DELAY"
    return "FIFO" if system.message_group else "NORMAL"


def checked_messages(messages: list[Wire], topic_type: str | None) -> None:
    """Refuse messages that RocketMQ would refuse. `topic_type`: the type of the topic; None: there is no such topic."""
    now = datetime.now(UTC)
    for message in messages:
        _check(message, now)
    for actual in map(type_of, messages):
        if actual != topic_type:
            raise RefusedError(
                Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
                internal(
                    f"TopicMessageType validate failed, the expected type is {topic_type or 'UNSPECIFIED'}, but actual"
                    f" type is {actual}"
                ).text,
            )
    if topic_type == "TRANSACTION" and len(messages) > 1:
        raise internal(
            "the message is illegal, maybe msg body or properties length not matched. msg body length limit"
            f" {MAX_BODY_BYTES}B, msg properties length limit 32KB."
        )


def checked_topic_of(messages: list[Wire]) -> str:
    """Return the topic of all messages."""
    if not messages:
        raise RefusedError(Code.MESSAGE_CORRUPTED, "no message to send")
    topic = checked_topic(messages[0].topic.name)
    if any(message.topic.name != topic for message in messages):
        raise RefusedError(Code.MESSAGE_CORRUPTED, "topic in message is not same")
    return topic


def _check(message: Wire, now: datetime) -> None:
    system = message.system_properties
    _check_body(message.body)
    _check_id(system.message_id)
    if system.HasField("tag") and system.tag:
        _check_text(Code.ILLEGAL_MESSAGE_TAG, "tag", system.tag, without="|")
    for key in system.keys:
        _check_text(Code.ILLEGAL_MESSAGE_KEY, "key", key)
    if system.message_group:
        _check_text(Code.ILLEGAL_MESSAGE_GROUP, "message group", system.message_group)
        if len(system.message_group.encode()) >= MAX_GROUP_BYTES:
            raise RefusedError(Code.ILLEGAL_MESSAGE_GROUP, f"message group exceed the max size {MAX_GROUP_BYTES}")
    _check_properties(message.user_properties)
    _check_times(system, now)


def _check_body(body: bytes) -> None:
    if not body:
        raise RefusedError(Code.MESSAGE_BODY_EMPTY, "message body cannot be empty")
    if len(body) > MAX_BODY_BYTES:
        raise RefusedError(Code.MESSAGE_BODY_TOO_LARGE, f"message body cannot exceed the max {MAX_BODY_BYTES}")


def _check_id(id: str) -> None:
    if not id.strip():
        raise RefusedError(Code.ILLEGAL_MESSAGE_ID, "message id cannot be empty")
    try:
        checked_transaction_id(id)
    except MQClientError as error:
        text = str(error).replace("transaction id", "message id")
        raise RefusedError(Code.ILLEGAL_MESSAGE_ID, text) from error


def _check_text(code: Code, what: str, text: str, *, without: str = "") -> None:
    if not text.strip():
        raise RefusedError(code, f"{what} cannot be the char sequence of whitespace")
    if without and without in text:
        raise RefusedError(code, f"{what} cannot contain '{without}'")
    if _CONTROL.search(text):
        raise RefusedError(code, f"{what} cannot contain control character")


def _check_properties(properties: Wire) -> None:
    code = Code.ILLEGAL_MESSAGE_PROPERTY_KEY
    if len(properties) > MAX_PROPERTIES:
        raise RefusedError(Code.MESSAGE_PROPERTIES_TOO_LARGE, f"too many user properties, max is {MAX_PROPERTIES}")
    for name, value in properties.items():
        if name in RESERVED:
            raise RefusedError(code, f"property is used by system: {name}")
        if _CONTROL.search(name):
            raise RefusedError(code, "the key of property cannot contain control character")
        if _CONTROL.search(value):
            raise RefusedError(code, "the value of property cannot contain control character")
    if sum(len(name.encode()) + len(value.encode()) for name, value in properties.items()) > MAX_PROPERTY_BYTES:
        raise RefusedError(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"the total size of user property is too large, max is {MAX_PROPERTY_BYTES}",
        )


def _check_times(system: Wire, now: datetime) -> None:
    milliseconds = timedelta(milliseconds=1)
    if system.HasField("delivery_timestamp") and _is_beyond(
        lambda: moment_of(system.delivery_timestamp) - now > MAX_DELAY
    ):
        raise RefusedError(
            Code.ILLEGAL_DELIVERY_TIME,
            f"the max delay time of message is too large, max is {MAX_DELAY // milliseconds}",
        )
    if _is_beyond(lambda: duration_of(system.orphaned_transaction_recovery_duration) > MAX_RECOVERY):
        raise RefusedError(
            Code.BAD_REQUEST,
            f"the max transaction recovery time of message is too large, max is {MAX_RECOVERY // timedelta(seconds=1)}",
        )


def _is_beyond(look: Callable[[], bool]) -> bool:
    """Return the answer; True for a time that no datetime can have."""
    try:
        return look()
    except OverflowError:
        return True


def checked_group(group: str) -> str:
    """Return the name of a consumer group."""
    try:
        return checked_consumer_group(group)
    except MQClientError as error:
        raise RefusedError(Code.ILLEGAL_CONSUMER_GROUP, str(error).replace(f"[{group!r}]", f"[{group}]")) from error


def checked_invisible(duration: timedelta, least: timedelta = _LEAST_INVISIBLE) -> timedelta:
    """Return the time for which a message is nobody else's."""
    if duration < least:
        text = f"the invisibleTime is too small. min is {least // _MILLISECOND}"
    elif duration > _MOST_INVISIBLE:
        text = f"the invisibleTime is too large. max is {_MOST_INVISIBLE // _MILLISECOND}"
    else:
        return duration
    raise RefusedError(Code.ILLEGAL_INVISIBLE_TIME, text)
