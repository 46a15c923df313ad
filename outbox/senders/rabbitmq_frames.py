"""A message as RabbitMQ carries it: the frames that publish it, and what of it cannot travel."""

from __future__ import annotations

from functools import lru_cache

import pamqp.frame
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from outbox.errors import InvalidMessageError
from outbox.model.limits import checked_topic
from outbox.model.message import Message
from outbox.senders.headers import CONTENT_TYPE, ID, Reserved, wire_headers

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

_FIX = "send the message anew without that, and discard this one"


def frames_of(message: Message, exchange: str, *, channel: int, frame_max: int) -> bytes:
    """Return the frames that publish a message on the channel of this number.

    Raises:
        InvalidMessageError: it is outside the limits of `Message`, or those of RabbitMQ.
    """
    publish = _publish_frame(exchange, message.topic, channel)
    header = pamqp.frame.marshal(ContentHeader(0, len(message.body), _properties(message)), channel)
    if len(header) > frame_max:
        limit = f"must be at most {frame_max} bytes on the wire, the server's frame_max, not {len(header)}"
        raise InvalidMessageError("headers", limit, _FIX)
    size = frame_max - _FRAME_OVERHEAD
    chunks = (message.body[start : start + size] for start in range(0, len(message.body), size))
    content = (pamqp.frame.marshal(ContentBody(chunk), channel) for chunk in chunks)
    return b"".join((publish, header, *content))


# An application has few topics for very many messages.
@lru_cache(maxsize=1024)
def _publish_frame(exchange: str, topic: str, channel: int) -> bytes:
    """Return the frame that says where a message goes.

    Raises:
        InvalidMessageError: the topic is outside the limits of `Message`.
    """
    publish = commands.Basic.Publish(exchange=exchange, routing_key=checked_topic(topic), mandatory=True)
    return bytes(pamqp.frame.marshal(publish, channel))


def _properties(message: Message) -> commands.Basic.Properties:
    """Return what travels of a message besides its topic and its body.

    Raises:
        InvalidMessageError: the headers of its row cannot travel.
    """
    headers = wire_headers(message, reserved=RESERVED)
    for name in headers:
        if len(name.encode()) > _LONGEST_NAME:
            limit = f"the name must be at most {_LONGEST_NAME} characters"
            raise InvalidMessageError(f"headers[{name!r:.80}]", limit, _FIX)
    return commands.Basic.Properties(
        message_id=headers.pop(ID),
        content_type=headers.pop(CONTENT_TYPE, None),
        timestamp=message.created_at,
        delivery_mode=_PERSISTENT,
        headers=dict(headers) or None,
    )
