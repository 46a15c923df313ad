"""Listeners of RocketMQ's consumers: what they are given, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from outbox.model.limits import DELAY_LEVELS
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Retry, Verdict, describe
from outbox.rocketmq.message_ext import MessageExt

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


class MessageListenerConcurrently:
    """Handles messages of any order. Override `consume_message`, or pass a function with these arguments."""

    def __init__(self, function: Callable[[list[MessageExt], ConsumeConcurrentlyContext], Any] | None = None) -> None:
        self._function = function

    def consume_message(
        self, messages: list[MessageExt], context: ConsumeConcurrentlyContext
    ) -> ConsumeConcurrentlyStatus:
        """Handle a batch, of one message unless the consumer says otherwise."""
        if self._function is None:
            raise NotImplementedError(f"{type(self).__name__} has no consume_message(messages, context)")
        status: ConsumeConcurrentlyStatus = self._function(messages, context)
        return status


class MessageListenerOrderly:
    """Handles the messages of a key in order. Override `consume_message`, or pass a function with these arguments."""

    def __init__(self, function: Callable[[list[MessageExt], ConsumeOrderlyContext], Any] | None = None) -> None:
        self._function = function

    def consume_message(self, messages: list[MessageExt], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
        """Handle a batch, of one message unless the consumer says otherwise."""
        if self._function is None:
            raise NotImplementedError(f"{type(self).__name__} has no consume_message(messages, context)")
        status: ConsumeOrderlyStatus = self._function(messages, context)
        return status


MessageListener = MessageListenerConcurrently | MessageListenerOrderly


def consume_concurrently(listener: MessageListenerConcurrently, messages: Sequence[Message]) -> list[Verdict]:
    """Call a listener; return the verdicts that its answer and its context stand for."""
    context, why = ConsumeConcurrentlyContext(), "the listener returned RECONSUME_LATER"
    status: object = None
    consume: Callable[..., object] = listener.consume_message
    try:
        status = consume([MessageExt(each) for each in messages], context)
        if not isinstance(status, ConsumeConcurrentlyStatus):
            why = f"the listener returned {status!r:.60}, which counts as RECONSUME_LATER"
    except Exception as error:
        why = describe(error)
    done = 0
    if status is ConsumeConcurrentlyStatus.CONSUME_SUCCESS:
        done, why = min(max(context.ack_index + 1, 0), len(messages)), "behind the ack_index of its batch"
    level = context.delay_level_when_next_consume
    after = _LEVELS[min(level, len(_LEVELS)) - 1] if level > 0 else None
    failed: Verdict = Reject(why) if level < 0 else Retry(why, after=after)
    return [DONE] * done + [failed] * (len(messages) - done)


def consume_orderly(listener: MessageListenerOrderly, messages: Sequence[Message], millis: int) -> list[Verdict]:
    """Call a listener; return the verdicts. `millis`: the pause after a failure, unless the context has another."""
    context, why = ConsumeOrderlyContext(), "the listener returned SUSPEND_CURRENT_QUEUE_A_MOMENT"
    consume: Callable[..., object] = listener.consume_message
    try:
        status = consume([MessageExt(each) for each in messages], context)
        if status is ConsumeOrderlyStatus.SUCCESS:
            return [DONE] * len(messages)
        if not isinstance(status, ConsumeOrderlyStatus):
            why = f"the listener returned {status!r:.60}, which suspends the queue"
    except Exception as error:
        why = describe(error)
    chosen = context.suspend_current_queue_time_millis
    pause = min(max(millis if chosen == -1 else chosen, _SHORTEST), _LONGEST)
    return [Retry(why, after=timedelta(milliseconds=pause))] * len(messages)
