"""Sending: a message of a client is in the log when the client has its receipt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outbox.errors import InvalidMessageError
from outbox.model.message import Message
from outbox.rocketmq.default_producer import Writes
from outbox.rocketmq.front.calls import Call, Threads
from outbox.rocketmq.front.conversion import id_of, stored
from outbox.rocketmq.front.protocol import RPCS, Wire
from outbox.rocketmq.front.routing import TopicType
from outbox.rocketmq.front.statuses import Code, RefusedError, internal, status
from outbox.rocketmq.front.transactions import Transactions
from outbox.rocketmq.front.validation import checked_messages, checked_topic_of

_Sent = RPCS["SendMessage"].response
#: A recall handle begins with this text.
_HANDLE = "recall:"


class Sending:
    """Stores the messages of clients: as they are, or as half messages."""

    def __init__(
        self, outbox: Writes, topics: Mapping[str, TopicType], transactions: Transactions, threads: Threads
    ) -> None:
        self._outbox = outbox
        self._topics = topics
        self._transactions = transactions
        self._threads = threads

    async def send(self, _call: Call, request: Wire) -> Wire:
        """Store messages of a topic, all or none."""
        messages = list(request.messages)
        topic = checked_topic_of(messages)
        type_ = self._topics.get(topic)
        checked_messages(messages, type_)
        try:
            if type_ == "TRANSACTION":
                await self._threads.run(lambda: self._transactions.prepare(messages[0]))
            else:
                made = [_once(stored(message)) for message in messages]
                await self._threads.run(lambda: self._append(made))
        except InvalidMessageError as error:
            raise RefusedError(Code.BAD_REQUEST, str(error)) from error
        answer = _Sent(status=status())
        for message in messages:
            id = message.system_properties.message_id
            handle = f"{_HANDLE}{id}" if type_ == "DELAY" else ""
            answer.entries.add(status=status(), message_id=id, transaction_id=id, recall_handle=handle)
        return answer

    async def recall(self, _call: Call, request: Wire) -> Wire:
        """Refuse to take a delayed message back, as RocketMQ does unless told otherwise."""
        is_ours = request.recall_handle.startswith(_HANDLE)
        raise internal("recall failed, operation is forbidden" if is_ours else "recall handle is invalid")

    def _append(self, messages: Sequence[Message]) -> None:
        with self._outbox.begin("requires_new") as session:
            self._outbox.send_all(session, messages)


def _once(message: Message) -> Message:
    """Mark a message with the client's id, so that a repetition is not stored."""
    message.dedup_key = id_of(message)
    return message
