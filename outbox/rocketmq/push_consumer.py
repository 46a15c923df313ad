"""RocketMQ's consumer that calls a listener."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cached_property
from typing import Self

from outbox.consumer.consumer import Consumer
from outbox.consumer.options import Suspend
from outbox.errors import MQClientError, SubscriptionError
from outbox.model.filter.tags import tag_expression
from outbox.model.retry import RETRY_LEVELS, RetryPolicy
from outbox.model.subscription import Start
from outbox.rocketmq.consuming import (
    ConsumeFromWhere,
    ListenerCalls,
    MessageListener,
    MessageListenerConcurrently,
    MessageListenerOrderly,
    MessageModel,
)
from outbox.rocketmq.expressions import Expression, MessageSelector, selection_of, subscribed_to
from outbox.rocketmq.limits import checked_consumer_group
from outbox.store.failure import in_one_line
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.writing.bare import BareOutbox

logger = logging.getLogger("outbox")

#: Retries without another number: of a concurrent consumer, and of an orderly one, which has no end.
_RETRIES, _ENDLESS = 16, 2**31 - 2
#: RocketMQ's form of a moment, in the time zone of the machine, and how long ago it is without another.
_MOMENT, _AGO = "%Y%m%d%H%M%S", timedelta(minutes=30)


@dataclass(eq=False)
class DefaultMQPushConsumer:
    """Calls a listener with the messages of a group: a `Consumer` in RocketMQ's shape.

    The fields are arguments, or are set before the start.

    Args:
        group: the consumer group, which has a position of its own in the log.
        outbox: where the messages are.
        message_model: BROADCASTING: each instance gets all messages.
        consume_from_where: where a new group begins.
        consume_timestamp: for CONSUME_FROM_TIMESTAMP, as yyyyMMddHHmmss; half an hour ago without one.
        consume_thread_max: calls of the listener at once, 1 to 1000.
        consume_message_batch_max_size: messages in a call, 1 to 1024.
        max_reconsume_times: after so many more deliveries a message is a dead letter. -1: 16, in order without end.
        suspend_current_queue_time_millis: the pause after a failure in order.
        consume_timeout: for a call, in minutes. Later the call holds its messages, and others are handled.
        partitions: how many processes may share a new group.
        suspend: the part that waits after a failure in order. "queue": all keys of the partition, which is RocketMQ's
            queue. "key": the key alone.
        instance_name: of this member of a group that broadcasts; the host's name without one.

    Raises:
        MQClientError: RocketMQ would refuse the name of the group.
    """

    group: str
    outbox: BareOutbox
    _: KW_ONLY
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
    consume_timestamp: str | None = None
    consume_thread_max: int = 20
    consume_message_batch_max_size: int = 1
    max_reconsume_times: int = -1
    suspend_current_queue_time_millis: int = 1000
    consume_timeout: int = 15
    partitions: int | None = None
    suspend: Suspend = "queue"
    instance_name: str | None = None

    def __post_init__(self) -> None:
        checked_consumer_group(self.group)
        self._subscribed: dict[str, MessageSelector] = {}
        self._listener: MessageListener | None = None

    def subscribe(self, topic: str, expression: Expression = "*") -> None:
        """Subscribe to a topic, before the start; a second time replaces the expression.

        Args:
            topic: a name, no pattern.
            expression: tags such as "TagA || TagB", "*" for all messages, or a `MessageSelector`.

        Raises:
            MQClientError: RocketMQ would refuse the topic.
            FilterError: the expression cannot be read.
        """
        self._require_not_begun()
        self._subscribed |= subscribed_to({topic: expression})

    def register_message_listener(self, listener: MessageListener) -> None:
        """Set the listener, before the start; its class says whether messages come in order."""
        if not isinstance(listener, MessageListenerOrderly | MessageListenerConcurrently):
            raise MQClientError(
                "messageListener must be instanceof MessageListenerOrderly or MessageListenerConcurrently: for a"
                " function write MessageListenerOrderly(function)"
            )
        self._require_not_begun()
        self._listener = listener

    @cached_property
    def consumer(self) -> Consumer:
        """The consumer of the outbox that does the work, for `run`, `until_empty` and `once`.

        Raises:
            MQClientError: there is no listener, or no subscription.
            TypeError: `message_model` or `consume_from_where` is no member of its enumeration.
        """
        _require_member("consume_from_where", self.consume_from_where, ConsumeFromWhere)
        _require_member("message_model", self.message_model, MessageModel)
        _require_range("consumeThreadMax", self.consume_thread_max, 1000)
        _require_range("consumeMessageBatchMaxSize", self.consume_message_batch_max_size, 1024)
        listener, choice = self._listener, selection_of(self._subscribed)
        if listener is None:
            raise MQClientError("messageListener is null")
        ordered, times = isinstance(listener, MessageListenerOrderly), self.max_reconsume_times
        if times == -1:
            times = _ENDLESS if ordered else _RETRIES
        consumer = Consumer(
            self.outbox,
            self.group,
            topics=choice.topics,
            tags=tag_expression(choice.tags),
            filter=choice.filter,
            ordered=ordered,
            start=_start_of(self.consume_from_where, self.consume_timestamp),
            partitions=self.partitions,
            concurrency=self.consume_thread_max,
            batch_size=self.consume_message_batch_max_size,
            deadline=timedelta(minutes=self.consume_timeout),
            retry=RetryPolicy(attempts=times + 1, wait=RETRY_LEVELS),
            suspend=self.suspend if ordered else "key",
            # A dead letter holds nothing back, as in RocketMQ.
            on_dead="continue",
            broadcast=self.message_model is MessageModel.BROADCASTING,
            instance=self.instance_name,
        )
        consumer.on()(ListenerCalls(self.group, listener, self.suspend_current_queue_time_millis).handle)
        return consumer

    def start(self) -> None:
        """Consume in a thread of this process until `shutdown`.

        Raises:
            SubscriptionError: the other members of the group have subscribed to something else.
        """
        self._require_subscription_of_group()
        self.consumer.start()

    def shutdown(self) -> None:
        """Finish the calls under way, and stop; do nothing before the start."""
        if self._has_begun:
            self.consumer.stop()
            self.consumer.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()

    def _require_subscription_of_group(self) -> None:
        """Raise if another subscription of the group is stored, before a thread would only log so."""
        declared = self.consumer.declared
        try:
            with closing(self.outbox.database.open()) as channel:
                Subscriptions(channel).check(declared)
        except SubscriptionError:
            # Not begun: another subscription can be given.
            del self.consumer
            raise
        except Exception as error:
            # The thread tries again until the database is there.
            why = in_one_line(error, self.outbox.database.commands)[0]
            logger.info("%s: the subscription of the group is not compared yet: %s", self.group, why)

    @property
    def _has_begun(self) -> bool:
        return "consumer" in vars(self)

    def _require_not_begun(self) -> None:
        if self._has_begun:
            raise MQClientError(f"consumer {self.group} has begun: subscribe and register the listener before start()")


def _start_of(where: ConsumeFromWhere, moment: str | None) -> Start:
    if where is ConsumeFromWhere.CONSUME_FROM_TIMESTAMP:
        if moment is None:
            return datetime.now(UTC) - _AGO
        try:
            return datetime.strptime(moment, _MOMENT).astimezone()
        except ValueError:
            raise MQClientError(
                f"consumeTimestamp is invalid, the valid format is yyyyMMddHHmmss,but received {moment:.40}"
            ) from None
    return "earliest" if where is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET else "latest"


def _require_member(name: str, given: object, words: type[Enum]) -> None:
    if not isinstance(given, words):
        known = ", ".join(map(str, words))
        raise TypeError(f"{name} must be a {words.__name__}, not {given!r:.40}; there are {known}")


def _require_range(name: str, number: int, most: int) -> None:
    if not 1 <= number <= most:
        raise MQClientError(f"{name} Out of range [1, {most}]")
