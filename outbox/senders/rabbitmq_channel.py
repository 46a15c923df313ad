"""A channel to RabbitMQ, on which the messages of a call are published and confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiormq import Channel as DriverChannel
from aiormq import ChannelClosed, DeliveryError, PublishError
from aiormq.abc import ChannelFrame

from outbox.errors import InvalidMessageError
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.senders.key_order import Chains
from outbox.senders.rabbitmq_frames import frames_of
from outbox.senders.rabbitmq_refusals import verdict_of_fault, words_of

#: The most that may wait for a confirmation at once.
_MAX_UNDER_WAY = 512
_MAX_BYTES_UNDER_WAY = 8 * 1024 * 1024


class Channel:
    """One channel, used by one call at a time. It expects the confirmation of each message without a task for it."""

    def __init__(self, driver: DriverChannel, exchange: str, frame_max: int) -> None:
        self._driver = driver
        self._exchange = exchange
        self._frame_max = frame_max
        self._news = asyncio.Event()
        self._closing = driver.closing
        self._closing.add_done_callback(lambda _: self._news.set())

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be published on it any more."""
        return self._driver.is_closed

    async def carry(self, call: Call) -> str | None:
        """Publish messages until each has its verdict; return why the server closed the channel, if it did.

        Raises:
            ConnectionError: the connection was lost.
        """
        published = [self._publish(call, index) for index in call.chains.under_way()]  # by a channel that was closed
        while not self._closing.done():
            while (index := call.chains.take()) is not None:
                published.append(self._publish(call, index))
            if any(published):
                payload = b"".join(published)
                await self._driver.write_queue.put(ChannelFrame(payload=payload, should_close=False))
                published.clear()
            if not call.chains.left:
                return None
            await self._news.wait()
            self._news.clear()
        error = None if self._closing.cancelled() else self._closing.exception()
        if isinstance(error, ChannelClosed):
            return str(error.args[-1])
        raise ConnectionError(words_of(error))

    def _publish(self, call: Call, index: int) -> bytes:
        """Return the frames that publish a message, and expect its confirmation; or settle what cannot be published."""
        message, frames = call.messages[index], b""
        verdict = call.verdict_of_fault(message)
        if verdict is None:
            try:
                frames = frames_of(message, self._exchange, channel=self._driver.number, frame_max=self._frame_max)
            except InvalidMessageError as error:
                verdict = Reject(str(error))
            except Exception as error:  # a row may hold anything, and the driver may choke on it in any way
                verdict = Reject(f"RabbitMQ cannot carry it: {words_of(error)}")
        id = "" if verdict is not None else str(message.message_id)
        if id in self._driver.message_id_delivery_tag:
            # The server returns messages by their id alone.
            verdict = Unavailable("RabbitMQ: another message of the same id is not confirmed yet")
        if verdict is not None:
            call.chains.settle(index, verdict)
            return b""
        self._expect(call, index, id)
        return frames

    def _expect(self, call: Call, index: int, id: str) -> None:
        """Have the driver tell what becomes of the message that is published next, as it does for its own."""
        confirmation = self._driver.create_future()
        self._driver.delivery_tag += 1
        self._driver.confirmations[self._driver.delivery_tag] = confirmation
        self._driver.message_id_delivery_tag[id] = self._driver.delivery_tag
        confirmation.add_done_callback(partial(self._confirmed, call, index, id))

    def _confirmed(self, call: Call, index: int, id: str, confirmation: asyncio.Future[Any]) -> None:
        message = call.messages[index]
        self._driver.message_id_delivery_tag.pop(id, None)
        if confirmation.cancelled():
            return
        error = confirmation.exception()
        if error is None:
            verdict: Verdict = DONE
        elif isinstance(error, PublishError):
            verdict = Unavailable(self._unroutable(message.topic))
        elif isinstance(error, DeliveryError):
            verdict = Unavailable(f"RabbitMQ: a queue for routing key {message.topic!r} refused it; it may be full")
        else:
            return  # the channel was closed, so that nothing is known of this message
        call.chains.settle(index, verdict)
        self._news.set()

    def _unroutable(self, topic: str) -> str:
        if self._exchange:
            return f"RabbitMQ: no queue is bound to exchange {self._exchange!r} for routing key {topic!r}; bind one"
        return f"RabbitMQ: no queue is bound for routing key {topic!r}: the default exchange wants a queue of that name"


class Call:
    """One call of `send`: its messages and their verdicts, and for what reasons the server closed its channels."""

    __slots__ = ("_reasons", "chains", "deadline", "messages", "seconds")

    def __init__(self, messages: Sequence[Message], seconds: float) -> None:
        self.messages = messages
        self.chains = Chains(messages, most=_MAX_UNDER_WAY, most_bytes=_MAX_BYTES_UNDER_WAY)
        self.seconds = seconds
        self.deadline = asyncio.get_running_loop().time() + seconds
        self._reasons: list[str] = []

    def blame(self, reason: str) -> bool:
        """Settle the messages that are at fault for this reason; return whether there are any."""
        self._reasons.append(reason)
        left = self.chains.left
        for index in self.chains.under_way():
            verdict = verdict_of_fault(reason, self.messages[index])
            if verdict is not None:
                self.chains.settle(index, verdict)
        return self.chains.left < left

    def verdict_of_fault(self, message: Message) -> Verdict | None:
        """Return the verdict on a message that the server would refuse, as far as this call knows."""
        verdicts = (verdict_of_fault(reason, message) for reason in self._reasons)
        return next((verdict for verdict in verdicts if verdict is not None), None)
