"""Receipts: the right of whoever received a parked message to end the wait for the next delivery, until that is due."""

from __future__ import annotations

from datetime import timedelta

from outbox.model.message import Message
from outbox.store.database import Channel
from outbox.store.subscriptions.parked import Parked

#: By primary key. Each handing-out stores an error of its own, and a message that is due may be in other hands.
_MINE = "subscription = :subscription AND id = :id AND error = :receipt AND state = 'retry' AND due_at > {now}"
_ACK = f"DELETE FROM {{parked}} WHERE {_MINE}"
_POSTPONE = f"UPDATE {{parked}} SET due_at = {{later}} WHERE {_MINE}"


class Receipts:
    """The receipts of one subscription; a receipt is the error with which a message was handed out, and no other time.

    Other rows of parked messages are changed by the lease holder alone. These rows no lease holder touches before the
    messages are due.
    """

    def __init__(self, channel: Channel, subscription: str) -> None:
        self._channel = channel
        self._subscription = subscription

    def ack(self, message: Message, receipt: str | None) -> bool:
        """Delete the message, which is done, and let the next one of its key be tried.

        Return False if the receipt is no longer valid.
        """
        if message.key is None:
            return self._run(_ACK, message, receipt)
        with self._channel.transaction():
            done = self._run(_ACK, message, receipt)
            if done:
                Parked(self._channel, self._subscription).advance({message.key})
        return done

    def postpone(self, message: Message, receipt: str | None, wait: timedelta) -> bool:
        """Let the message be due after `wait` from now; return False if the receipt is no longer valid."""
        return self._run(_POSTPONE, message, receipt, seconds=wait.total_seconds())

    def _run(self, statement: str, message: Message, receipt: str | None, **more: object) -> bool:
        bound = {"subscription": self._subscription, "id": message.id, "receipt": receipt}
        return self._channel.run(statement, **bound, **more) == 1
