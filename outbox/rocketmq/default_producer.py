"""The producer of plain messages, which are part of the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy.orm import Session

from outbox.errors import MQClientError
from outbox.model.message import Message
from outbox.model.slots import slot_of
from outbox.rocketmq.limits import checked_batch, checked_group, checked_message, size_of
from outbox.rocketmq.selectors import Selector, key_of, selected
from outbox.rocketmq.states import MessageQueue, SendResult
from outbox.store.database import Database
from outbox.writing.handles import Handle
from outbox.writing.scopes import Propagation
from outbox.writing.transaction import Transactions

#: Of the splitter in RocketMQ's examples; RocketMQ advises 1 MiB, and refuses more than 4 MiB.
_SPLIT_BYTES = 1_000_000


class Writes(Protocol):
    """The part of an `Outbox` that writes."""

    database: Database
    transactions: Transactions

    def begin(self, propagation: Propagation = ...) -> AbstractContextManager[Session]:
        """Do as `Outbox.begin`."""

    def send_all(self, handle: Handle, messages: Iterable[Message]) -> list[UUID]:
        """Do as `Outbox.send_all`."""


class DefaultMQProducer:
    """Sends messages in the caller's transaction: `outbox.send` in RocketMQ's shape, with its limits.

    Nothing has to be started or shut down: `start` and `shutdown` are there for code that calls them. `group` is
    checked, and means nothing else, because no transaction is asked about.

    Raises:
        MQClientError: RocketMQ would refuse the name of the group.
    """

    def __init__(self, group: str, outbox: Writes) -> None:
        self.group = checked_group(group)
        self._outbox = outbox

    def start(self) -> None:
        """Do nothing: messages go with the caller's transaction."""

    def shutdown(self) -> None:
        """Do nothing; the producer can still send."""

    def send(
        self, message: Message, selector: Selector | None = None, arg: Any = None, *, session: Handle | None = None
    ) -> SendResult:
        """Append a message in the caller's transaction.

        Args:
            message: without a key if there is a selector.
            selector: chooses the queue by `arg`, an order id, say. Messages of a queue are in order, because the queue
                becomes their key. For a finer order give each message its own `key`, and no selector.
            arg: handed to the selector.
            session: as of `outbox.send`; None: the running transaction of `outbox.begin` or `outbox.transactional`.

        Raises:
            MQClientError: RocketMQ would refuse the message; or the selector raises, or returns no queue.
            NoTransactionError: no transaction is running.
        """
        message = checked_message(message)
        if selector is not None:
            message = self._in_queue(message, selector, arg)
        (msg_id,) = self._write([message], session)
        return SendResult(msg_id=msg_id, message_queue=self._queue_of(message))

    def send_batch(self, messages: Iterable[Message], *, session: Handle | None = None) -> SendResult:
        """Append messages of one topic in the caller's transaction: all or none, and in this order in the log.

        Raises:
            MQClientError: RocketMQ would refuse a message, or the batch; `split_batch` makes smaller ones.
            NoTransactionError: no transaction is running.
        """
        return SendResult(msg_id=",".join(self._write(checked_batch(messages), session)))

    def _in_queue(self, message: Message, selector: Selector, arg: Any) -> Message:
        if message.key is not None:
            raise MQClientError(
                f"the message has the key {message.key!r:.60}, by which it is ordered already: send it without a"
                " selector, or without the key"
            )
        slots = self._outbox.database.slots
        copy = message.replace(key=key_of(selected(selector, message, arg, slots), slots))
        copy.message_id = message.message_id
        return copy

    def _queue_of(self, message: Message) -> MessageQueue | None:
        if message.key is None:
            return None
        return MessageQueue(message.topic, slot_of(message.key, self._outbox.database.slots))

    def _write(self, messages: Sequence[Message], session: Handle | None) -> list[str]:
        with self._outbox.begin("mandatory") if session is None else nullcontext(session) as handle:
            return [str(id) for id in self._outbox.send_all(handle, messages)]


def split_batch(messages: Iterable[Message], limit: int = _SPLIT_BYTES) -> Iterator[list[Message]]:
    """Split messages into batches of at most `limit` bytes, in order; a larger message travels alone."""
    batch, size = list[Message](), 0
    for message in messages:
        if batch and size + size_of(message) > limit:
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += size_of(message)
    if batch:
        yield batch
