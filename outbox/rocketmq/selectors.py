"""Selectors of queues: RocketMQ's way to keep the messages of an order, say, in order."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, Protocol

from outbox.errors import MQClientError
from outbox.model.message import Message
from outbox.model.slots import slot_of
from outbox.rocketmq.states import MessageQueue


class MessageQueueSelector(Protocol):
    """Selects the queue of a message."""

    @abstractmethod
    def select(self, queues: Sequence[MessageQueue], message: Message, arg: Any) -> MessageQueue:
        """Return one of the queues. `arg`: the third argument of `send`; equal ones should get the same queue."""


#: A selector, or a function in its place.
Selector = MessageQueueSelector | Callable[[Sequence[MessageQueue], Message, Any], MessageQueue]


class SelectMessageQueueByHash:
    """Selects by the hash that Java has for `arg`, which is a str, an int or a bool."""

    def select(self, queues: Sequence[MessageQueue], message: Message, arg: Any) -> MessageQueue:
        """Return the queue of the hash."""
        # RocketMQ takes the absolute value of Java's remainder, whose sign is that of the hash.
        return queues[abs(java_hash(arg)) % len(queues)]


class SelectMessageQueueByRandom:
    """Selects any queue, whatever `arg` is."""

    def select(self, queues: Sequence[MessageQueue], message: Message, arg: Any) -> MessageQueue:
        """Return a random queue."""
        return random.choice(queues)


def java_hash(value: object) -> int:
    """Return the `hashCode` of Java's String, Integer or Long, and Boolean: a signed number of 32 bits."""
    if isinstance(value, bool):
        return 1231 if value else 1237
    if isinstance(value, int):
        # An int that has room in 32 bits is an Integer, which is its own hash; others are a Long.
        found = value if -(2**31) <= value < 2**31 else value ^ (value >> 32)
    elif isinstance(value, str):
        units = value.encode("utf-16-be", "surrogatepass")
        found = 0
        for at in range(0, len(units), 2):
            found = 31 * found + int.from_bytes(units[at : at + 2]) & 0xFFFF_FFFF
    else:
        raise TypeError(f"a str, an int or a bool has a hash here, not {type(value).__name__}: pass str(…)")
    return (found + 2**31) % 2**32 - 2**31


def selected(selector: Selector, message: Message, arg: Any, slots: int) -> MessageQueue:
    """Return the queue that a selector chooses for a message; the queues of a topic are the slots of the outbox."""
    queues = [MessageQueue(message.topic, number) for number in range(slots)]
    select: Any = getattr(selector, "select", selector)
    try:
        queue = select(queues, message, arg)
    except Exception as error:
        raise MQClientError(f"select message queue threw exception. {type(error).__name__}: {error}") from error
    if queue is None:
        raise MQClientError("select message queue return null.")
    if queue not in queues:
        raise MQClientError(f"select message queue return {queue!r:.100}, which is none of the queues.")
    found: MessageQueue = queue
    return found


@lru_cache(maxsize=4096)
def key_of(queue: MessageQueue, slots: int) -> str:
    """Return the key of all messages of a queue: the first of `<topic>@0`, `<topic>@1`, … that has the queue's slot."""
    keys = (f"{queue.topic}@{number}" for number in count())
    return next(key for key in keys if slot_of(key, slots) == queue.queue_id)
