"""A channel to RabbitMQ: frames that publish messages, confirmations, and the faults of messages."""

from __future__ import annotations

import asyncio
import re
from functools import lru_cache, partial
from typing import Any

import pamqp.frame
from aiormq import Channel as DriverChannel
from aiormq import ChannelClosed, DeliveryError, PublishError
from aiormq.abc import AbstractConnection, ChannelFrame
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from outbox.errors import InvalidMessageError
from outbox.model.limits import checked_topic
from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.senders.connection_log import reason_of
from outbox.senders.headers import CONTENT_TYPE, FIX, ID, Reserved, wire_headers
from outbox.senders.remote import Call

#: Servers send copies to the routing keys in `CC` and `BCC`. The others are added, or obeyed, by servers and plugins.
RESERVED = Reserved(
    "RabbitMQ",
    prefixes=("x-first-death-", "x-last-death-", "x-stream-"),
    names=("cc", "bcc", "x-death", "x-delay", "x-delivery-count", "x-received-from"),
)

_PERSISTENT = 2
#: Bytes of a frame around what it carries.
_FRAME_OVERHEAD = 8
#: Bytes of the name of a header. The driver shortens longer ones.
_LONGEST_NAME = 128

_TOO_BIG = re.compile(r"message size \d+ is larger than (?:configured )?max size (\d+)")
_OTHER_KIND = re.compile(r"inequivalent arg '([a-z_]+)'")
#: The kinds of queues that lose messages, by the property that differs from a durable queue's.
_LOSSES = {
    "durable": "it is transient: a restart of the server deletes it with its messages",
    "auto_delete": "auto-delete: it goes with its last consumer, and its messages with it",
}
_FORBIDDEN_TOPIC = "access to topic '"
#: The end of a reason that the server has cut, because AMQP allows it 255 bytes.
_CUT = "..."


class Channel:
    """One channel, used by one call at a time, without a task for each confirmation."""

    def __init__(self, driver: DriverChannel, exchange: str, frame_max: int) -> None:
        self._driver = driver
        self._exchange = exchange
        self._frame_max = frame_max
        self._news = asyncio.Event()
        self._closing = driver.closing
        self._closing.add_done_callback(lambda _: self._news.set())

    @property
    def is_closed(self) -> bool:
        """Whether the channel takes nothing any more."""
        return self._driver.is_closed

    async def carry(self, call: Call, faults: Faults) -> str | None:
        """Publish until each message has a verdict; return why the server closed the channel; raise after a loss."""
        published = [self._publish(call, faults, index) for index in call.chains.under_way()]  # by a closed channel
        while not self._closing.done():
            while (index := call.chains.take()) is not None:
                published.append(self._publish(call, faults, index))
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
        # The driver may put its own cancellation there.
        raise error if isinstance(error, Exception) else ConnectionError("the connection was lost")

    def _publish(self, call: Call, faults: Faults, index: int) -> bytes:
        """Return the frames that publish a message, and expect the confirmation; or settle the message."""
        message, frames = call.messages[index], b""
        verdict = faults.verdict_on(message)
        if verdict is None:
            try:
                frames = frames_of(message, self._exchange, channel=self._driver.number, frame_max=self._frame_max)
            except InvalidMessageError as error:
                verdict = Reject(str(error))
            except Exception as error:  # a row may hold anything, and the driver may choke on it in any way
                verdict = Reject(f"RabbitMQ cannot carry it: {reason_of(error)}")
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
        """Have the driver report on the message that is published next."""
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
        return f"RabbitMQ: no queue is bound for routing key {topic!r}: the default exchange wants a queue of this name"


class Faults:
    """The reasons for which the server has closed channels in one call, and the messages to blame."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._reasons: list[str] = []

    def blame(self, reason: str) -> bool:
        """Settle the messages at fault for a reason; return whether there are any."""
        self._reasons.append(reason)
        chains = self._call.chains
        left = chains.left
        for index in chains.under_way():
            verdict = verdict_of_fault(reason, self._call.messages[index])
            if verdict is not None:
                chains.settle(index, verdict)
        return chains.left < left

    def verdict_on(self, message: Message) -> Verdict | None:
        """Return the verdict on a message that the server would refuse, as far as the call knows."""
        verdicts = (verdict_of_fault(reason, message) for reason in self._reasons)
        return next((verdict for verdict in verdicts if verdict is not None), None)


async def loss_of_queue(connection: AbstractConnection, name: str) -> str | None:
    """Return under which circumstance a queue loses messages; None: no such queue, or none is known.

    A server tells the kind of a queue only by refusing a declaration of another kind, and closes the channel then.
    """
    try:
        # First whether the queue is there, because the second declaration would make it.
        await (await connection.channel()).queue_declare(name, passive=True)
        channel = await connection.channel()
        await channel.queue_declare(name, durable=True)
    except ChannelClosed as error:
        found = _OTHER_KIND.search(str(error.args[-1]))
        return None if found is None else _LOSSES.get(found[1])
    await channel.close()
    return None


def verdict_of_fault(reason: str, message: Message) -> Verdict | None:
    """Return the verdict on a message at fault for a reason; None for other messages.

    A reason about the whole exchange, such as a missing exchange, is the fault of no message.
    """
    too_big = _TOO_BIG.search(reason)
    if too_big is not None and len(message.body) > int(too_big[1]):
        return Reject(f"{len(message.body)} bytes are more than the server's max_message_size of {too_big[1]}")
    if _forbids(reason, message.topic):
        return Unavailable(f"RabbitMQ: {reason}")
    return None


def _forbids(reason: str, topic: str) -> bool:
    """Return whether the user may not write to the topic, although to others of the exchange."""
    _, found, rest = reason.partition(_FORBIDDEN_TOPIC)
    quoted = f"{topic}'"
    is_cut = rest.endswith(_CUT) and quoted.startswith(rest.removesuffix(_CUT))
    return bool(found) and (rest.startswith(quoted) or is_cut)


def frames_of(message: Message, exchange: str, *, channel: int, frame_max: int) -> bytes:
    """Return the frames that publish a message on a channel; raise `InvalidMessageError` beyond a limit."""
    publish = _publish_frame(exchange, message.topic, channel)
    header = pamqp.frame.marshal(ContentHeader(0, len(message.body), _properties(message)), channel)
    if len(header) > frame_max:
        limit = f"must be at most {frame_max} bytes on the wire, the server's frame_max, not {len(header)}"
        raise InvalidMessageError("headers", limit, FIX)
    size = frame_max - _FRAME_OVERHEAD
    chunks = (message.body[start : start + size] for start in range(0, len(message.body), size))
    content = (pamqp.frame.marshal(ContentBody(chunk), channel) for chunk in chunks)
    return b"".join((publish, header, *content))


# An application has few topics for very many messages.
@lru_cache(maxsize=1024)
def _publish_frame(exchange: str, topic: str, channel: int) -> bytes:
    """Return the frame with exchange and routing key; raise `InvalidMessageError` if no message has the topic."""
    publish = commands.Basic.Publish(exchange=exchange, routing_key=checked_topic(topic), mandatory=True)
    return bytes(pamqp.frame.marshal(publish, channel))


def _properties(message: Message) -> commands.Basic.Properties:
    """Return the fields of a message besides topic and body; raise `InvalidMessageError` if a header cannot travel."""
    headers = wire_headers(message, reserved=RESERVED)
    for name in headers:
        if len(name.encode()) > _LONGEST_NAME:
            limit = f"the name must be at most {_LONGEST_NAME} characters"
            raise InvalidMessageError(f"headers[{name!r:.80}]", limit, FIX)
    return commands.Basic.Properties(
        message_id=headers.pop(ID),
        content_type=headers.pop(CONTENT_TYPE, None),
        timestamp=message.created_at,
        delivery_mode=_PERSISTENT,
        headers=dict(headers) or None,
    )
