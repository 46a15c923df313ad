"""RocketMQ's consumer that asks for messages, and acknowledges each."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from typing import NamedTuple, Self

from outbox.errors import MQClientError, SubscriptionError
from outbox.model.message import Message
from outbox.model.subscription import Declaration, Start
from outbox.rocketmq.asked import Asked
from outbox.rocketmq.connections import Connections
from outbox.rocketmq.expressions import Expression, selection_of, subscribed_to
from outbox.rocketmq.hints import Hints
from outbox.rocketmq.limits import checked_consumer_group
from outbox.rocketmq.message_ext import MessageExt
from outbox.rocketmq.popping import Popping, new_receipt, opening
from outbox.rocketmq.together import Together
from outbox.runtime.clock import clock
from outbox.runtime.fork import in_child
from outbox.runtime.throttled_log import ThrottledLog
from outbox.runtime.wakeup import Wake
from outbox.store.database import Channel
from outbox.store.failure import in_one_line
from outbox.store.subscriptions.receipts import Receipt, Receipts
from outbox.worker.failures import log_away, passes
from outbox.worker.polling import Polling
from outbox.writing.bare import BareOutbox

logger = logging.getLogger("outbox")

#: The most messages that RocketMQ's broker hands out at once.
MAX_MESSAGES = 32
#: Pauses of a call that waits, until it hears of a commit.
POLL_SECONDS = (0.05, 1.0)
#: A call gets so much time, however short the time to wait for messages is: for a lease that another has for a moment,
#: and for a database that is away.
_SHORTEST_SECONDS = 10.0
#: One for the calls that receive, the others for receipts.
_CONNECTIONS = 3


class SimpleConsumer:
    """Hands messages out, each for a time; a message that is not acknowledged by then is handed out again.

    Any number of consumers may share a group, in any process; `receive` may be called by several threads. A call is one
    short transaction, which serves all calls that wait in this consumer; acknowledgements go together likewise. No
    worker has the name of the group meanwhile.

    Args:
        group: the consumer group, which has a position of its own in the log.
        outbox: where the messages are.
        subscriptions: for each topic an expression: tags such as "TagA || TagB", "*" for all, or a `MessageSelector`.
        await_duration: for how long `receive` waits for a message, unless the call says otherwise.
        fifo: a key is handed out in order. A call gets messages of a key together; its next ones come after the `ack`
            of all of them.
        max_attempts: deliveries, after which a message becomes a dead letter.
        start: where a new group begins: "earliest", "latest" or a moment.

    Raises:
        MQClientError: RocketMQ would refuse the group or a topic.
        FilterError: an expression cannot be read.
        TypeError, ValueError: `subscriptions` is no mapping, `await_duration` no time, or `max_attempts` below 1.
    """

    def __init__(
        self,
        group: str,
        outbox: BareOutbox,
        subscriptions: Mapping[str, Expression],
        *,
        await_duration: timedelta = timedelta(seconds=20),
        fifo: bool = False,
        max_attempts: int = 17,
        start: Start = "earliest",
    ) -> None:
        self.group = checked_consumer_group(group)
        require_duration("await_duration", await_duration, timedelta(0))
        if not isinstance(subscriptions, Mapping):
            raise TypeError(f"subscriptions is a dict of topics, not {subscriptions!r:.60}; write {{'orders': '*'}}")
        if max_attempts < 1:
            raise ValueError(f"max_attempts is a number from 1 on, not {max_attempts}")
        choice = selection_of(subscribed_to(subscriptions))
        self._outbox = outbox
        self._await_duration = await_duration
        declared = Declaration(
            name=group,
            destination=None,
            kind="consumer",
            topics=choice.topics,
            tags=choice.tags,
            filter=choice.filter,
            on_dead="continue",
            ordered=fifo,
        )
        self._popping = Popping(outbox, declared, start=start, max_attempts=max_attempts)
        self._connections = Connections(opening(outbox), _CONNECTIONS)
        self._hints = Hints(outbox, opening(outbox))
        self._log = ThrottledLog(logger)
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        self._pops, self._acks = Together(self._pop), Together(self._ack)

    def receive(
        self, max_message_num: int, invisible_duration: timedelta, wait: timedelta | None = None
    ) -> list[MessageExt]:
        """Return messages, which nobody else gets for `invisible_duration`; wait for the first one.

        Args:
            max_message_num: 1 to 32.
            invisible_duration: the time to handle the messages and to acknowledge them.
            wait: for how long the call waits for a message; None: `await_duration` of the consumer.

        Returns:
            At most so many messages; none after that time, or after 10 s while the database does not answer.

        Raises:
            ValueError: a number or a time is outside its limits.
            SubscriptionError: the group has other subscriptions, or another order; it was dropped meanwhile; or a
                worker has had its lease for the whole time, and 10 s at least.
        """
        if not 1 <= max_message_num <= MAX_MESSAGES:
            raise ValueError(f"max_message_num is a number from 1 to {MAX_MESSAGES}, not {max_message_num}")
        require_duration("invisible_duration", invisible_duration, timedelta(milliseconds=1))
        wait = self._await_duration if wait is None else wait
        require_duration("wait", wait, timedelta(0))
        asked, began = Asked(max_message_num, invisible_duration), clock()
        until, at_last = began + wait.total_seconds(), began + max(_SHORTEST_SECONDS, wait.total_seconds())
        popped = self._pops.call(asked)
        if not popped.messages and (popped.hindered or until > began):
            popped = self._wait(asked, until, at_last)
        return [MessageExt.of(message, popped.receipt) for message in popped.messages]

    def _wait(self, asked: Asked, until: float, at_last: float) -> _Popped:
        """Pop again and again, until there are messages or the time is over."""
        polling, wake = Polling(*POLL_SECONDS), Wake()
        with closing(wake), self._hints.wake(wake.set):
            popped = self._pops.call(asked)
            while not popped.messages and (left := (at_last if popped.hindered else until) - clock()) > 0:
                wake.wait(min(left, polling.pause()))
                popped = self._pops.call(asked)
        holders = [] if popped.messages else self._popping.holders
        if popped.hindered and holders:
            raise SubscriptionError(
                f"{self.group}: {holders[0].owner} has the lease of the group; its messages go to a worker, or to calls"
                " of receive, and not to both: stop the worker, or give one of the two another group"
            )
        return popped

    def _pop(self, asked: Sequence[Asked]) -> list[_Popped]:
        """Pop once for calls that wait."""
        receipt = new_receipt()
        try:
            with self._connections.one() as channel, channel.database.explained():
                found = self._popping.pop(channel, receipt, asked)
        except Exception as error:
            if not passes(self._outbox.database, error, known=self._popping.known):
                raise
            log_away(self._log, in_one_line(error, self._outbox.database.commands)[0])
            return [_Popped(receipt, [], hindered=True)] * len(asked)
        hindered = bool(self._popping.holders)
        return [_Popped(receipt, messages, hindered) for messages in found]

    def ack(self, message: MessageExt) -> None:
        """Acknowledge a message, which is done then.

        Raises:
            MQClientError: "receipt handle is expired": the time is over, and the message is handed out again.
        """
        if not self._acks.call(_receipt_of(message)):
            raise MQClientError("receipt handle is expired")

    def change_invisible_duration(self, message: MessageExt, invisible_duration: timedelta) -> None:
        """Have a message for `invisible_duration` from now on; 0: hand it out again at once.

        Raises:
            MQClientError: "receipt handle is expired": the time is over, and the message is handed out again.
        """
        require_duration("invisible_duration", invisible_duration, timedelta(0))
        receipts = [_receipt_of(message)]

        def postpone(channel: Channel) -> set[int]:
            return Receipts(channel, self.group).postpone(receipts, invisible_duration)

        if not self._connections.call(postpone):
            raise MQClientError("receipt handle is expired")

    def close(self) -> None:
        """Close the connections; messages that were not acknowledged are handed out again when their time is over."""
        self._hints.close()
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _ack(self, receipts: Sequence[Receipt]) -> list[bool]:
        """Acknowledge the messages of calls that wait; return whether each receipt was worth something."""
        done = self._connections.call(lambda channel: Receipts(channel, self.group).ack(receipts))
        return [each.id in done for each in receipts]


def _receipt_of(message: MessageExt) -> Receipt:
    return Receipt(message.queue_offset, message.receipt_handle or "")


class _Popped(NamedTuple):
    """What a call gets, under a receipt. `hindered`: a lease, or a database that is away, has kept messages from it."""

    receipt: str
    messages: list[Message]
    hindered: bool


def require_duration(name: str, duration: timedelta, least: timedelta) -> None:
    """Refuse what is no time, or less than `least`."""
    if not isinstance(duration, timedelta) or duration < least:
        raise ValueError(f"{name} is a timedelta of at least {least}, not {duration!r:.40}")
