"""RocketMQ's consumer that asks for messages, and acknowledges each."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Self

from outbox.errors import MQClientError
from outbox.model.message import Message
from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Declaration, Start
from outbox.model.verdict import Reject, Retry, Verdict
from outbox.rocketmq.connections import Connections
from outbox.rocketmq.expressions import Expression, selection_of, subscribed_to
from outbox.rocketmq.limits import checked_consumer_group
from outbox.rocketmq.message_ext import MessageExt
from outbox.runtime.clock import clock
from outbox.runtime.stop import Stop
from outbox.store.log.log import Limits
from outbox.store.subscriptions.receipts import Receipts
from outbox.telemetry.events import Event, Listeners, Parked
from outbox.worker.job import Job
from outbox.worker.policy import BEHIND, HandlerPolicy
from outbox.worker.polling import Polling
from outbox.worker.settings import Settings
from outbox.worker.worker import Worker
from outbox.writing.bare import BareOutbox

#: The most messages that RocketMQ's broker hands out at once.
MAX_MESSAGES = 32
#: A look ends after it has set so many messages aside behind keys that are in other hands, because it copies each.
MAX_ASIDE = 10 * MAX_MESSAGES
#: For messages that are not handed out; nothing is counted.
_LEFT = Retry("left for the next call", after=timedelta(0), counts=False)
_POLL_SECONDS = (0.05, 1.0)
#: A call gets so much time, however short the time to wait for messages is: for the lease of another consumer, and for
#: a database that is away.
_SHORTEST_SECONDS = 10.0
#: A call is short, and so is its lease, for which others wait if its process is killed.
_SETTINGS = Settings(
    limits=Limits(rows=MAX_MESSAGES),
    lease=timedelta(seconds=3),
    renew_every=timedelta(seconds=1),
)


class SimpleConsumer:
    """Hands messages out, each for a time; a message that is not acknowledged by then is handed out again.

    Any number of consumers may share a group, in any process; `receive` may be called by several threads. A call takes
    the lease of the group for a moment, so a group can be asked some twenty times a second.

    Args:
        group: the consumer group, which has a position of its own in the log.
        outbox: where the messages are.
        subscriptions: for each topic an expression: tags such as "TagA || TagB", "*" for all, or a `MessageSelector`.
        await_duration: for how long `receive` waits for a message.
        fifo: a key is handed out in order; its next message comes after the `ack` of the last.
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
        self._await_seconds = await_duration.total_seconds()
        self._max_attempts = max_attempts
        self._start: Start = start
        self._declared = Declaration(
            name=group,
            destination=None,
            kind="consumer",
            topics=choice.topics,
            tags=choice.tags,
            filter=choice.filter,
            on_dead="continue",
            ordered=fifo,
        )
        self._connections = Connections(outbox.database.open, 2)
        #: True when the group was there before: dropped, it does not begin again at its start.
        self._known = False

    def receive(self, max_message_num: int, invisible_duration: timedelta) -> list[MessageExt]:
        """Return messages, which nobody else gets for `invisible_duration`; wait for the first one.

        Args:
            max_message_num: 1 to 32.
            invisible_duration: the time to handle the messages and to acknowledge them.

        Returns:
            At most so many messages; none after `await_duration`, after 10 s while the database does not answer, or
            when the connection was lost before they were stored as handed out.

        Raises:
            ValueError: a number or a time is outside its limits.
            SubscriptionError: the group has other subscriptions, or another order; or was dropped meanwhile.
        """
        if not 1 <= max_message_num <= MAX_MESSAGES:
            raise ValueError(f"max_message_num is a number from 1 to {MAX_MESSAGES}, not {max_message_num}")
        require_duration("invisible_duration", invisible_duration, timedelta(milliseconds=1))
        fifo = self._declared.ordered is True
        receiving = _Receiving(max_message_num, invisible_duration, self._max_attempts, fifo=fifo)
        listeners = Listeners(self._outbox.listeners)
        listeners.listen(receiving.told)
        # The handler counts the deliveries, because the last one is to be acknowledged like any other.
        retry = RetryPolicy(attempts=self._max_attempts + 1)
        policy = HandlerPolicy(retry=retry, least=max_message_num, momentary=True)
        handler = receiving.hand_out
        job = Job(declared=self._declared, handler=handler, policy=policy, start=self._start, known=self._known)
        worker = Worker(self._outbox.database, [job], _SETTINGS, stop=receiving.stop, listeners=listeners)
        timer = threading.Timer(max(_SHORTEST_SECONDS, self._await_seconds), receiving.time_over.ask)
        polling, until = Polling(*_POLL_SECONDS), clock() + self._await_seconds
        hints = self._outbox.notifier.listen(worker.wake.set)
        timer.start()
        try:
            # Each look takes the lease anew, because an `ack` elsewhere may have released a key.
            while True:
                worker.work("empty")
                self._known = self._known or worker.known
                left = until - clock()
                if receiving.taken or receiving.over or left <= 0:
                    return [MessageExt.of(message, receiving.receipt) for message in receiving.taken]
                receiving.look_again()
                worker.wake.wait(min(left, polling.pause()))
        finally:
            timer.cancel()
            del hints

    def ack(self, message: MessageExt) -> None:
        """Acknowledge a message, which is done then.

        Raises:
            MQClientError: "receipt handle is expired": the time is over, and the message is handed out again.
        """
        self._use(message, Receipts.ack)

    def change_invisible_duration(self, message: MessageExt, invisible_duration: timedelta) -> None:
        """Have a message for `invisible_duration` from now on; 0: hand it out again at once.

        Raises:
            MQClientError: "receipt handle is expired": the time is over, and the message is handed out again.
        """
        require_duration("invisible_duration", invisible_duration, timedelta(0))
        self._use(message, Receipts.postpone, invisible_duration)

    def close(self) -> None:
        """Close the connections; messages that were not acknowledged are handed out again when their time is over."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _use(self, message: MessageExt, use: Callable[..., bool], *more: timedelta) -> None:
        receipt = message.message, message.receipt_handle
        if not self._connections.call(lambda channel: use(Receipts(channel, self.group), *receipt, *more)):
            raise MQClientError("receipt handle is expired")


class _Receiving:
    """The messages of one `receive`."""

    def __init__(self, most: int, invisible: timedelta, max_attempts: int, *, fifo: bool) -> None:
        """`most`: at most so many messages."""
        self.time_over = Stop()
        #: Ends a look.
        self.stop = Stop(self.time_over)
        self.taken: list[Message] = []
        #: Stored as the error of what is handed out. Errors that differ in numbers are shown as one.
        self.receipt = f"handed out under receipt {secrets.randbits(64)}"
        self._room = self._most = most
        self._aside = 0
        self._invisible = invisible
        self._max_attempts = max_attempts
        self._fifo = fifo

    @property
    def over(self) -> bool:
        """True when the call ends, also when what was handed out could not be stored."""
        return self.time_over.asked or self._room < self._most

    def look_again(self) -> None:
        """Begin another look, which may set as many messages aside as the last one."""
        self._aside = 0
        self.stop.withdraw()

    def hand_out(self, messages: Sequence[Message]) -> list[Verdict]:
        """Answer for messages, each of which is parked until its time is over; stop when some are handed out.

        A call that went on would hand them out again, should their time be over so soon.
        """
        verdicts, keys = list[Verdict](), set[str]()
        for message in messages:
            if message.key in keys:
                # It waits behind the first message of its key, whatever the answer.
                verdicts.append(_LEFT)
                continue
            if self._fifo and message.key is not None:
                keys.add(message.key)
            verdicts.append(self._verdict(message))
        if self._room < self._most:
            self.stop.ask()
        return verdicts

    def _verdict(self, message: Message) -> Verdict:
        if message.attempt > self._max_attempts:
            return Reject(f"not acknowledged after {self._max_attempts} deliveries")
        if self._room <= 0:
            return _LEFT
        self._room -= 1
        return Retry(self.receipt, after=self._invisible)

    def told(self, event: Event) -> None:
        """Take note of messages that are stored as handed out; without that, another consumer may get them.

        Messages that are stored behind a key in other hands end the look when there are many.
        """
        if isinstance(event, Parked):
            self.taken += [each for each, parking in event.messages if parking.error == self.receipt]
            self._aside += sum(parking is BEHIND for _, parking in event.messages)
            if self._aside >= MAX_ASIDE:
                self.stop.ask()


def require_duration(name: str, duration: timedelta, least: timedelta) -> None:
    """Refuse what is no time, or less than `least`."""
    if not isinstance(duration, timedelta) or duration < least:
        raise ValueError(f"{name} is a timedelta of at least {least}, not {duration!r:.40}")
