"""Receipts: the right of whoever received a parked message to end the wait for the next delivery, until that is due."""

from __future__ import annotations

from datetime import timedelta

from outbox.model.message import Message
from outbox.store.database import Channel
from outbox.store.subscriptions.parked import Parked

#: By primary key. A later delivery has counted another attempt, and a message that is due may be in other hands. In
#: another outbox, or since ids were given out again, another message has the id.
_MINE = """
    subscription = :subscription AND id = :id AND message_id = :message_id AND attempts = :attempts
    AND state = 'retry' AND due_at > {now}
"""
_ACK = f"DELETE FROM {{parked}} WHERE {_MINE}"
_POSTPONE = f"UPDATE {{parked}} SET due_at = {{later}} WHERE {_MINE}"


class Receipts:
    """The receipts of one subscription; a receipt is a message with the number of its delivery.

    Other rows of parked messages are changed by the lease holder alone. These rows no lease holder touches before the
    messages are due.
    """

    def __init__(self, channel: Channel, subscription: str) -> None:
        self._channel = channel
        self._subscription = subscription

    def ack(self, message: Message) -> bool:
        """Delete the message, which is done, and let the next one of its key be tried.

        Return False if the receipt is no longer valid.
        """
        if message.key is None:
            return self._channel.run(_ACK, **self._receipt(message)) == 1
        with self._channel.transaction():
            done = self._channel.run(_ACK, **self._receipt(message)) == 1
            if done:
                Parked(self._channel, self._subscription).advance({message.key})
        return done

    def postpone(self, message: Message, wait: timedelta) -> bool:
        """Let the message be due after `wait` from now; return False if the receipt is no longer valid."""
        return self._channel.run(_POSTPONE, **self._receipt(message), seconds=wait.total_seconds()) == 1

    def _receipt(self, message: Message) -> dict[str, object]:
        return {
            "subscription": self._subscription,
            "id": message.id,
            "message_id": self._channel.database.dialect.values.bind_uuid(message.message_id),
            "attempts": message.attempt,
        }
