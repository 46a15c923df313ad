"""Listeners of RocketMQ's consumers: what they are given, and what they answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from outbox.consumer.listener import require_arguments
from outbox.model.limits import DELAY_LEVELS
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Retry, Verdict, describe
from outbox.rocketmq.message_ext import MessageExt
from outbox.runtime.throttled_log import Throttle
from outbox.senders.port import destination_of

logger = logging.getLogger("outbox")

_LEVELS = tuple(DELAY_LEVELS.values())
#: The limits of the pause after a failure in order, in milliseconds.
_SHORTEST, _LONGEST = 10, 30_000
#: More than any batch has.
_ALL = 2**31 - 1


class MessageModel(Enum):
    """The members of a group share its messages, or each member gets all."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class ConsumeFromWhere(Enum):
    """The beginning of a new group: of what is committed from now on, of the whole log, or of a moment."""

    CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    CONSUME_FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    CONSUME_FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class ConsumeConcurrentlyStatus(Enum):
    """The answer of a `MessageListenerConcurrently`; any other answer, or an exception, is RECONSUME_LATER."""

    CONSUME_SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


class ConsumeOrderlyStatus(Enum):
    """The answer of a `MessageListenerOrderly`; any other answer, or an exception, suspends the queue."""

    SUCCESS = "SUCCESS"
    SUSPEND_CURRENT_QUEUE_A_MOMENT = "SUSPEND_CURRENT_QUEUE_A_MOMENT"


@dataclass(slots=True)
class ConsumeConcurrentlyContext:
    """Set by a listener to say more than its status.

    `delay_level_when_next_consume`: the level from 1 to 18 after which failed messages come again. 0: as the group's
    retries say. -1: they are dead letters at once. `ack_index`: of a batch that succeeded, the messages behind this
    index failed nevertheless.
    """

    delay_level_when_next_consume: int = 0
    ack_index: int = _ALL


@dataclass(slots=True)
class ConsumeOrderlyContext:
    """Set by a listener to say more than its status.

    `suspend_current_queue_time_millis`: the pause after which the messages come again, from 10 ms to 30 s; -1: as the
    consumer says.
    """

    suspend_current_queue_time_millis: int = -1


class MessageListener:
    """Handles messages: override `consume_message`, or pass a function with the same arguments.

    A call has one message, unless the consumer says otherwise.
    """

    def __init__(self, function: Callable[[list[MessageExt], Any], object] | None = None) -> None:
        """`function`: None for a subclass with the method.

        Raises:
            TypeError: neither is there, or the function has other arguments.
        """
        if function is not None:
            require_arguments(function, destination_of(function).removeprefix("callable:"), "messages", "context")
        elif type(self).consume_message is MessageListener.consume_message:
            raise TypeError(
                f"{type(self).__name__} has no consume_message(messages, context): write the method, or pass a function"
            )
        self._function: Any = function

    def consume_message(self, messages: list[MessageExt], context: Any) -> object:
        """Handle messages, and return a status; the context says more."""
        return self._function(messages, context)


class MessageListenerConcurrently(MessageListener):
    """Handles messages in any order; gets a `ConsumeConcurrentlyContext`, returns a `ConsumeConcurrentlyStatus`."""


class MessageListenerOrderly(MessageListener):
    """Handles the messages of a key in order; gets a `ConsumeOrderlyContext`, returns a `ConsumeOrderlyStatus`."""


class ListenerCalls:
    """Calls the listener of a group, and returns the verdicts that its answers and contexts stand for."""

    def __init__(self, group: str, listener: MessageListener, pause: int) -> None:
        """`pause`: after a failure in order, in milliseconds, unless the context has another."""
        self._group = group
        self._listener = listener
        self._pause = pause
        self._throttle = Throttle()

    def handle(self, messages: Sequence[Message]) -> list[Verdict]:
        """Call the listener."""
        if isinstance(self._listener, MessageListenerOrderly):
            return self._handle_orderly(messages)
        return self._handle_concurrently(messages)

    def _handle_concurrently(self, messages: Sequence[Message]) -> list[Verdict]:
        context, done = ConsumeConcurrentlyContext(), 0
        status, why = self._ask(messages, context, ConsumeConcurrentlyStatus)
        if status is ConsumeConcurrentlyStatus.CONSUME_SUCCESS:
            done, why = min(max(context.ack_index + 1, 0), len(messages)), "behind the ack_index of its batch"
        level = context.delay_level_when_next_consume
        after = _LEVELS[min(level, len(_LEVELS)) - 1] if level > 0 else None
        failed: Verdict = Reject(why) if level < 0 else Retry(why, after=after)
        return [DONE] * done + [failed] * (len(messages) - done)

    def _handle_orderly(self, messages: Sequence[Message]) -> list[Verdict]:
        context = ConsumeOrderlyContext()
        status, why = self._ask(messages, context, ConsumeOrderlyStatus)
        if status is ConsumeOrderlyStatus.SUCCESS:
            return [DONE] * len(messages)
        chosen = context.suspend_current_queue_time_millis
        pause = min(max(self._pause if chosen == -1 else chosen, _SHORTEST), _LONGEST)
        return [Retry(why, after=timedelta(milliseconds=pause))] * len(messages)

    def _ask(self, messages: Sequence[Message], context: object, statuses: type[Enum]) -> tuple[object, str]:
        """Return the status, and in words what the listener returned or raised; log anything but a status."""
        try:
            status = self._listener.consume_message([MessageExt.of(each) for each in messages], context)
        except Exception as error:
            if self._throttle.allows(type(error).__name__):
                logger.warning("%s: the listener raised %s", self._group, describe(error), exc_info=error)
            return None, describe(error)
        if not isinstance(status, statuses) and self._throttle.allows(type(status).__name__):
            text = "%s: the listener returned %.60r; let the listener return a %s"
            logger.warning(text, self._group, status, statuses.__name__)
        return status, f"the listener returned {status.name if isinstance(status, Enum) else repr(status):.60}"
