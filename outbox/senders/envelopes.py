"""Envelopes: the forms in which destinations of any kind get messages, for consumers that expect one of them.

raw           the message as it is
cloudevents   a CloudEvents 1.0 event in structured mode: all in one JSON object, which is the body
debezium      as Debezium's outbox event router writes it: header `id`, topic `outbox.event.<topic>`, and the header
              `eventType` that its documentation adds; key and body as they are

See https://debezium.io/documentation/reference/stable/transformations/outbox-event-router.html for the defaults of the
last one. Nothing here uses a driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from outbox.model.limits import stored_headers
from outbox.model.message import Message
from outbox.senders.cloud_events import STRUCTURED, structured_body
from outbox.senders.headers import own_headers

EnvelopeName = Literal["raw", "cloudevents", "debezium"]
#: Puts a message into its envelope, and addresses it to the topic.
Envelope = Callable[[Message, str], Message]

#: The router's `route.topic.replacement` is `outbox.event.${routedByValue}`.
DEBEZIUM_PREFIX = "outbox.event."
#: Where CloudEvents say that they come from, as those of a webhook that is told nothing else.
_SOURCE = "/outbox"
_DEBEZIUM_NAMES = ("id", "eventtype")


def _raw(message: Message, topic: str) -> Message:
    if topic == message.topic:
        return message
    return message.sent_as(
        topic, headers_json=message.headers_json, body=message.body, content_type=message.content_type
    )


def _cloudevents(message: Message, topic: str) -> Message:
    # The type stays the message's own topic: it says what happened, and not where that is sent.
    body = structured_body(message, source=_SOURCE)
    return message.sent_as(topic, headers_json=message.headers_json, body=body, content_type=STRUCTURED)


def _debezium(message: Message, topic: str) -> Message:
    # Set last, and in any case, so that no header of the row can replace them.
    own = own_headers(message)
    headers = {name: value for name, value in own.items() if name.lower() not in _DEBEZIUM_NAMES}
    headers["id"] = message.id_text
    if message.tags is not None:
        headers["eventType"] = message.tags
    return message.sent_as(
        topic, headers_json=stored_headers(headers), body=message.body, content_type=message.content_type
    )


ENVELOPES: dict[EnvelopeName, Envelope] = {"raw": _raw, "cloudevents": _cloudevents, "debezium": _debezium}
