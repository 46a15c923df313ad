"""Checks of names and messages, in the order and in the words of RocketMQ's server."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from outbox.errors import MQClientError
from outbox.model.encoding import MAX_BODY_BYTES
from outbox.rocketmq.front.protocol import Wire, moment_of, numbers
from outbox.rocketmq.front.statuses import NO_TRANSACTION, Code, RefusedError, internal
from outbox.rocketmq.limits import checked_consumer_group, checked_name_of_topic, checked_transaction_id

#: RocketMQ's own limits.
MAX_PROPERTIES, MAX_PROPERTY_BYTES = 128, 16384
MAX_GROUP_BYTES = 64
#: RocketMQ has no limit on the messages of a call; this one keeps a transaction short.
MAX_MESSAGES = 1000
#: Of the messages of a call, and characters of a tag expression: a request has room for millions, and a look at each
#: takes the time of all clients.
MAX_KEYS, MAX_EXPRESSION = 16_384, 8192
MAX_DELAY, MAX_RECOVERY = timedelta(days=1), timedelta(hours=1)
#: For the time of a message in the hands of a client.
LEAST_INVISIBLE, MOST_INVISIBLE = timedelta(seconds=10), timedelta(hours=12)
_MILLISECOND = timedelta(milliseconds=1)
#: Properties that RocketMQ sets itself, by its `MessageConst`.
RESERVED = frozenset({
    "1ST_POP_TIME", "ARRIVE_TIME", "BORN_TIMESTAMP", "BUYER_ID", "CLUSTER", "CONSUME_START_TIME", "CORRECTION_FLAG",
    "CORRELATION_ID", "DELAY", "DLQ_ORIGIN_MESSAGE_ID", "DLQ_ORIGIN_TOPIC", "DUP_INFO", "EXTEND_UNIQ_INFO",
    "INNER_MULTI_QUEUE_OFFSET", "INSTANCE_ID", "KEYS", "MAX_OFFSET", "MAX_RECONSUME_TIMES", "MIN_OFFSET", "MQ2_FLAG",
    "MSG_REGION", "MSG_TYPE", "ORIGIN_MESSAGE_ID", "PGROUP", "POP_CK", "POP_CK_OFFSET", "PUSH_REPLY_TIME", "REAL_QID",
    "REAL_TOPIC", "RECONSUME_TIME", "REPLY_TO_CLIENT", "RETRY_TOPIC", "TAGS", "TIMER_DELAY_LEVEL", "TIMER_DELAY_MS",
    "TIMER_DELAY_SEC", "TIMER_DELIVER_MS", "TIMER_DEL_MS", "TIMER_DEL_UNIQKEY", "TIMER_DEQUEUE_MS",
    "TIMER_ENQUEUE_MS", "TIMER_OUT_MS", "TIMER_ROLL_TIMES", "TRACE_ON", "TRANSFER_FLAG", "TRAN_MSG",
    "TRAN_PREPARED_QUEUE_OFFSET", "TTL", "UNIQ_KEY", "WAIT", "__BORNHOST", "__CRC32#",
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
    if system.message_group:
        return "FIFO"
    # No topic here has one of these types, and their messages would lose what makes them such.
    if system.HasField("priority"):
        return "PRIORITY"
    return "LITE" if system.HasField("lite_topic") else "NORMAL"


def checked_number(messages: Sequence[Wire]) -> Sequence[Wire]:
    """Return the messages of a call, if there are not too many: a request has room for millions without contents."""
    if len(messages) > MAX_MESSAGES:
        raise RefusedError(Code.PAYLOAD_TOO_LARGE, f"too many messages, max is {MAX_MESSAGES}")
    return messages


def checked_messages(messages: Sequence[Wire], types: Mapping[str, str]) -> str | None:
    """Refuse messages that RocketMQ would refuse; return the type of their topic. `types`: of all topics by name."""
    if not messages:
        raise RefusedError(Code.MESSAGE_CORRUPTED, "no message to send")
    if sum(len(message.system_properties.keys) for message in checked_number(messages)) > MAX_KEYS:
        raise RefusedError(Code.MESSAGE_PROPERTIES_TOO_LARGE, f"too many keys, max is {MAX_KEYS}")
    topic, now = messages[0].topic, datetime.now(UTC)
    checked_topic(topic.name)
    for message in messages:
        if message.topic != topic:
            raise RefusedError(Code.MESSAGE_CORRUPTED, "topic in message is not same")
        _check(message, now)
    expected = types.get(topic.name)
    for actual in map(type_of, messages):
        if actual != expected:
            raise of_another_type(topic.name, expected, actual)
    is_half = expected == "TRANSACTION"
    if (is_half and len(messages) > 1) or sum(len(message.body) for message in messages) > MAX_BODY_BYTES:
        raise internal(
            "the message is illegal, maybe msg body or properties length not matched. msg body length limit"
            f" {MAX_BODY_BYTES}B, msg properties length limit 32KB.",
            "a call has one message of a transaction, or messages whose bodies keep the limit together",
        )
    return expected


def of_another_type(topic: str, expected: str | None, actual: str) -> RefusedError:
    """Return the error of a message of another type than that of its topic; None: there is no such topic."""
    types = f"the expected type is {expected or 'UNSPECIFIED'}, but actual type is {actual}"
    add = f"the topic is not there; add it by: outbox rocketmq topics add {shlex.quote(topic)} --type {actual}"
    text = internal(f"TopicMessageType validate failed, {types}", "" if expected else add).text
    return RefusedError(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, text)


def checked_tags(expression: str) -> str:
    """Return a tag expression, if it is not too long to be read."""
    if len(expression) > MAX_EXPRESSION:
        raise RefusedError(
            Code.ILLEGAL_FILTER_EXPRESSION,
            f"subString split error [a tag expression has at most {MAX_EXPRESSION} characters, not {len(expression)}]",
        )
    return expression


def checked_transaction(id: str) -> str:
    """Return the id of a transaction."""
    if not id.strip():
        raise RefusedError(Code.INVALID_TRANSACTION_ID, "transaction id cannot be empty")
    try:
        return checked_transaction_id(id)
    except MQClientError as error:
        raise internal(NO_TRANSACTION, str(error)) from error


def _check(message: Wire, now: datetime) -> None:
    """Refuse a message that RocketMQ would refuse, for the fault that it finds first."""
    system = message.system_properties
    _check_body(message.body)
    _check_properties(message)
    _check_id(system.message_id)
    _check_times(system, now)
    if system.message_group:
        code = Code.ILLEGAL_MESSAGE_GROUP
        if system.message_group.strip() and len(system.message_group.encode()) >= MAX_GROUP_BYTES:
            raise RefusedError(code, f"message group exceed the max size {MAX_GROUP_BYTES}")
        _check_text(code, "message group", system.message_group)


def _check_body(body: bytes) -> None:
    if not body:
        raise RefusedError(Code.MESSAGE_BODY_EMPTY, "message body cannot be empty")
    if len(body) > MAX_BODY_BYTES:
        raise RefusedError(Code.MESSAGE_BODY_TOO_LARGE, f"message body cannot exceed the max {MAX_BODY_BYTES}")


def _check_id(id: str) -> None:
    if not id.strip():
        raise RefusedError(Code.ILLEGAL_MESSAGE_ID, "message id cannot be empty")
    if id != id.strip():
        raise RefusedError(Code.ILLEGAL_MESSAGE_ID, "message id cannot begin or end with white space")
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


def _check_properties(message: Wire) -> None:
    code, properties, system = Code.ILLEGAL_MESSAGE_PROPERTY_KEY, message.user_properties, message.system_properties
    if len(properties) > MAX_PROPERTIES:
        raise RefusedError(Code.MESSAGE_PROPERTIES_TOO_LARGE, f"too many user properties, max is {MAX_PROPERTIES}")
    for name, value in properties.items():
        if name in RESERVED:
            raise RefusedError(code, f"property is used by system: {name}")
        if _CONTROL.search(name):
            raise RefusedError(code, "the key of property cannot contain control character")
        if _CONTROL.search(value):
            raise RefusedError(code, "the value of property cannot contain control character")
    if system.tag:
        _check_text(Code.ILLEGAL_MESSAGE_TAG, "tag", system.tag, without="|")
    for key in filter(None, system.keys):
        _check_text(Code.ILLEGAL_MESSAGE_KEY, "key", key)
    texts = [*properties.keys(), *properties.values(), system.tag, *system.keys]
    if sum(len(text.encode()) for text in texts) > MAX_PROPERTY_BYTES:
        raise RefusedError(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"the total size of user property is too large, max is {MAX_PROPERTY_BYTES}",
        )


def _check_times(system: Wire, now: datetime) -> None:
    recovery = system.orphaned_transaction_recovery_duration.seconds
    if system.message_type == _TRANSACTION and recovery > MAX_RECOVERY // timedelta(seconds=1):
        raise RefusedError(
            Code.BAD_REQUEST,
            f"the max transaction recovery time of message is too large, max is {MAX_RECOVERY // timedelta(seconds=1)}",
        )
    if system.HasField("delivery_timestamp") and _is_beyond(
        lambda: moment_of(system.delivery_timestamp) - now > MAX_DELAY
    ):
        raise RefusedError(
            Code.ILLEGAL_DELIVERY_TIME,
            f"the max delay time of message is too large, max is {MAX_DELAY // _MILLISECOND}",
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


def checked_invisible(duration: timedelta, least: timedelta = LEAST_INVISIBLE) -> timedelta:
    """Return the time for which a message is nobody else's."""
    if duration < least:
        text = f"the invisibleTime is too small. min is {least // _MILLISECOND}"
    elif duration > MOST_INVISIBLE:
        text = f"the invisibleTime is too large. max is {MOST_INVISIBLE // _MILLISECOND}"
    else:
        return duration
    raise RefusedError(Code.ILLEGAL_INVISIBLE_TIME, text)
