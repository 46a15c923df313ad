"""Messages as RocketMQ's consumers see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from outbox.model.message import Message


@dataclass(frozen=True)
class MessageExt:
    """A message in the hands of a consumer, with RocketMQ's names for its parts. `message`: as the outbox has it."""

    message: Message

    @property
    def topic(self) -> str:
        """The topic to which the message was sent, also when it is delivered again."""
        return self.message.topic

    @property
    def body(self) -> bytes:
        """The body."""
        return self.message.body

    @property
    def tags(self) -> str | None:
        """The tag."""
        return self.message.tags

    @property
    def keys(self) -> str | None:
        """The key, which is the unit of order here."""
        return self.message.key

    @property
    def msg_id(self) -> str:
        """The id, the same at every delivery."""
        return self.message.id_text

    @property
    def queue_offset(self) -> int:
        """The place in the log, which all queues share."""
        return self.message.id or 0

    @property
    def born_timestamp(self) -> int:
        """The moment of the insert, in milliseconds since 1970, by the clock of the database."""
        created = self.message.created_at
        return 0 if created is None else round(created.timestamp() * 1000)

    @property
    def reconsume_times(self) -> int:
        """How often the message was delivered before."""
        return self.message.attempt - 1

    @property
    def delivery_attempt(self) -> int:
        """The number of this delivery, from 1 on: the name in 5.x for `reconsume_times` + 1."""
        return self.message.attempt

    @property
    def transaction_id(self) -> str | None:
        """The id of the message's transaction, if it was sent in a transaction of RocketMQ's model."""
        return self.message.transaction_id

    @cached_property
    def properties(self) -> Mapping[str, str]:
        """The headers, and RocketMQ's own properties: also `RETRY_TOPIC` and `ORIGIN_MESSAGE_ID` from the second
        delivery on.
        """
        own = {"UNIQ_KEY": self.msg_id, "KEYS": self.keys, "TAGS": self.tags}
        if self.reconsume_times:
            own |= {
                "RETRY_TOPIC": self.topic,
                "ORIGIN_MESSAGE_ID": self.msg_id,
                "RECONSUME_TIME": str(self.reconsume_times),
            }
        return {**self.message.headers, **{name: value for name, value in own.items() if value is not None}}

    def get_property(self, name: str) -> str | None:
        """Return a property; None if the message does not have it."""
        return self.properties.get(name)
