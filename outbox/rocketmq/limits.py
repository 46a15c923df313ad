"""RocketMQ's own limits and texts, which are stricter than those of the log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta

from outbox.errors import MQClientError
from outbox.model.command import OF_ENVIRONMENT
from outbox.model.encoding import MAX_BODY_BYTES
from outbox.model.limits import HALF_TOPIC, MAX_KEY_BYTES
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
#: More topics that nobody subscribes to.
_SYSTEM = {HALF_TOPIC, "TBW102", "BenchmarkTest", "RMQ_SYS_TRACE_TOPIC", "CHECKPOINT_TOPIC"}
#: Properties that RocketMQ sets itself, by its `MessageConst`.
_RESERVED = (
    "KEYS", "TAGS", "WAIT", "DELAY", "RETRY_TOPIC", "REAL_TOPIC", "REAL_QID", "TRAN_MSG", "PGROUP", "UNIQ_KEY",
    "ORIGIN_MESSAGE_ID", "RECONSUME_TIME", "MAX_RECONSUME_TIMES", "TRAN_PREPARED_QUEUE_OFFSET", "TIMER_DELAY_SEC",
    "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "TIMER_OUT_MS", TRANSACTION_ID, CHECK_TIMES,
)  # fmt: skip
_MOST_IMMUNITY_SECONDS = 10**9
#: The topic of a consumer group's messages that are tried again, and of its dead letters, begin with these.
RETRY, DLQ = "%RETRY%", "%DLQ%"
#: The bytes of a message in a batch besides topic, body and properties.
_OVERHEAD = 20


def checked_group(group: str) -> str:
    """Return the name of a producer group; raise in RocketMQ's words if it would refuse the name."""
    return _checked_group(group, "producerGroup", "DEFAULT_PRODUCER")


def checked_consumer_group(group: str) -> str:
    """Return the name of a consumer group; raise in RocketMQ's words if it would refuse the name."""
    return _checked_group(group, "consumerGroup", "DEFAULT_CONSUMER")


def _checked_group(group: str, what: str, reserved: str) -> str:
    if not isinstance(group, str) or not group.strip():
        raise MQClientError("the specified group is blank")
    if len(group) > MAX_GROUP:
        raise MQClientError(f"the specified group is longer than group max length {MAX_GROUP}.")
    if not re.fullmatch(_NAME, group):
        raise MQClientError(f"the specified group[{group!a:.260}] contains illegal characters, allowing only {_NAME}")
    if group == reserved:
        raise MQClientError(f"{what} can not equal {reserved}, please specify another one.")
    return group


def checked_subscribed(topic: str) -> str:
    """Return a topic to consume; raise in RocketMQ's words if it would refuse the topic."""
    topic = checked_name_of_topic(topic)
    if topic.startswith((RETRY, DLQ)):
        group = topic.removeprefix(RETRY).removeprefix(DLQ)
        replay = OF_ENVIRONMENT.line("parked", "replay", "--all", "--name", group)
        raise MQClientError(
            f"{topic} is no topic here: dead_letters(outbox, '{DLQ}<group>') lists the dead letters; to send them"
            f" again, run: {replay}"
        )
    return topic


def checked_name_of_topic(topic: str) -> str:
    """Return the name of a topic; raise in RocketMQ's words if it is none, or is of the system's own."""
    if not isinstance(topic, str) or not topic.strip():
        raise MQClientError("The specified topic is blank")
    _check_name(topic)
    if topic in _FORBIDDEN | _SYSTEM or topic.startswith("rmq_sys_"):
        raise MQClientError("cannot access system topic")
    return topic


def checked_transaction_id(id: str) -> str:
    """Return the id of a transaction; raise in RocketMQ's words if it is empty."""
    if not isinstance(id, str):
        raise TypeError(f"a transaction id is a str, not {type(id).__name__}")
    if not id:
        raise MQClientError("transaction id cannot be empty")
    if len(id.encode(errors="replace")) > MAX_KEY_BYTES or not id.isprintable():
        raise MQClientError(f"a transaction id has at most {MAX_KEY_BYTES} bytes, all of which can be printed")
    return id


def require_message(message: object) -> Message:
    """Return a message; refuse anything else."""
    if not isinstance(message, Message):
        raise MQClientError("the message is null", MESSAGE_ILLEGAL)
    return message


def checked_message(message: object) -> Message:
    """Return a message; raise in RocketMQ's words if it would refuse the message."""
    message = require_message(message)
    _check_name(message.topic)
    if message.topic in _FORBIDDEN:
        raise MQClientError(f"Sending message to topic[{message.topic}] is forbidden.")
    if not message.body:
        raise MQClientError("the message body length is zero", MESSAGE_ILLEGAL)
    headers = message.headers
    for name in _RESERVED:
        if name in headers:
            raise MQClientError(f"The Property<{name}> is used by system, input another please", MESSAGE_ILLEGAL)
    if not all(headers.values()):
        raise MQClientError("The name or value of property can not be null or blank string!", MESSAGE_ILLEGAL)
    return message


def checked_batch(messages: Iterable[Message]) -> list[Message]:
    """Return the messages of a batch; raise in RocketMQ's words if it would refuse one of them, or all together."""
    batch: list[Message] = []
    for message in map(require_message, messages):
        if message.delay is not None:
            raise _no_batch("TimeDelayLevel is not supported for batching")
        if message.topic.startswith(RETRY):
            raise _no_batch("Retry Group is not supported for batching")
        if batch and message.topic != batch[0].topic:
            raise _no_batch("The topic of the messages in one batch should be the same")
        batch.append(checked_message(message))
    if not batch:
        raise _no_batch("there is no message")
    if sum(map(size_of, batch)) > MAX_BODY_BYTES:
        raise MQClientError(f"the message body size over max value, MAX: {MAX_BODY_BYTES}", MESSAGE_ILLEGAL)
    return batch


def size_of(message: Message) -> int:
    """Return the bytes of a message in a batch, as the splitter in RocketMQ's examples counts them."""
    properties = sum(len(name) + len(value.encode()) for name, value in message.headers.items())
    return len(message.topic) + len(message.body) + properties + _OVERHEAD


def checked_immunity(message: Message) -> timedelta | None:
    """Refuse a message that cannot be part of a transaction, in RocketMQ's words.

    Return for how long no checker may ask about the transaction, if the message says so.
    """
    if checked_message(message).dedup_key is not None:
        raise MQClientError("a message of a transaction has no dedup_key; its message_id is sent once", MESSAGE_ILLEGAL)
    asked = message.headers.get(IMMUNITY)
    if asked is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", asked) or int(asked) > _MOST_IMMUNITY_SECONDS:
        raise MQClientError(
            f"{IMMUNITY} must be a decimal integer of seconds, 0 to {_MOST_IMMUNITY_SECONDS}, but is {asked!a:.60}",
            MESSAGE_ILLEGAL,
        )
    return timedelta(seconds=int(asked))


def _check_name(topic: str) -> None:
    if len(topic) > MAX_TOPIC:
        raise MQClientError(f"The specified topic is longer than topic max length {MAX_TOPIC}.")
    if not re.fullmatch(_NAME, topic):
        raise MQClientError(f"The specified topic[{topic}] contains illegal characters, allowing only {_NAME}")


def _no_batch(why: str) -> MQClientError:
    return MQClientError(f"Failed to initiate the MessageBatch: {why}")
