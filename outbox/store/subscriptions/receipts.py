"""Receipts: the right of whoever received a parked message to end the wait for the next delivery, until that is due."""

from __future__ import annotations

from datetime import timedelta

from outbox.store.database import Channel

#: By primary key. A later delivery has counted another attempt, and a message that is due may be in other hands.
_MINE = """
    subscription = :subscription AND id = :id AND attempts = :attempts AND state = 'retry' AND due_at > {now}
"""
_ACK = f"DELETE FROM {{parked}} WHERE {_MINE}"
_POSTPONE = f"UPDATE {{parked}} SET due_at = {{later}} WHERE {_MINE}"


class Receipts:
    """The receipts of one subscription; a receipt is a log id and the number of the delivery.

    Other rows of parked messages are changed by the lease holder alone. These rows no lease holder touches before the
    messages are due.
    """

    def __init__(self, channel: Channel, subscription: str) -> None:
        self._channel = channel
        self._common = {"subscription": subscription}

    def ack(self, id: int, attempt: int) -> bool:
        """Delete the message, which is done; return False if the receipt is no longer valid."""
        return self._channel.run(_ACK, **self._common, id=id, attempts=attempt) == 1

    def postpone(self, id: int, attempt: int, wait: timedelta) -> bool:
        """Let the message be due after `wait` from now; return False if the receipt is no longer valid."""
        seconds = wait.total_seconds()
        return self._channel.run(_POSTPONE, **self._common, id=id, attempts=attempt, seconds=seconds) == 1
