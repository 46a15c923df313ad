"""Messages as RocketMQ's consumers see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from outbox.model.message import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageExt:
    """A message in the hands of a consumer, with RocketMQ's names for its parts. `message`: as the outbox has it.

    `msg_id`: the same at every delivery. `queue_offset`: the log id, by which all queues count. `reconsume_times`: how
    often the message was delivered before. `receipt_handle`: names this delivery to a `SimpleConsumer`; else None.
    """

    message: Message
    topic: str
    body: bytes
    tags: str | None
    keys: str | None
    msg_id: str
    queue_offset: int
    reconsume_times: int
    receipt_handle: str | None = None

    @classmethod
    def of(cls, message: Message, receipt_handle: str | None = None) -> Self:
        """Return a message of the outbox by RocketMQ's names."""
        return cls(
            message=message,
            topic=message.topic,
            body=message.body,
            tags=message.tags,
            keys=message.key,
            msg_id=message.id_text,
            queue_offset=message.id or 0,
            reconsume_times=message.attempt - 1,
            receipt_handle=receipt_handle,
        )

    @property
    def properties(self) -> dict[str, str]:
        """The headers and RocketMQ's own properties; from the second delivery on also those of a retry."""
        own = {"UNIQ_KEY": self.msg_id, "KEYS": self.keys, "TAGS": self.tags}
        if self.reconsume_times:
            own |= {"RETRY_TOPIC": self.topic, "ORIGIN_MESSAGE_ID": self.msg_id}
            own |= {"RECONSUME_TIME": str(self.reconsume_times)}
        return {**self.message.headers, **{name: value for name, value in own.items() if value is not None}}
