"""A sender that belongs to an Outbox: its relay and its direct sends use it in turns, and neither closes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outbox.model.message import Message
from outbox.model.verdict import Verdict
from outbox.runtime.fair_lock import FairLock
from outbox.senders.opening import OpenedSender


class SerializedSender(OpenedSender):
    """Calls another sender, for one caller at a time."""

    def __init__(self, sender: OpenedSender) -> None:
        super().__init__(sender, sender.destination)
        #: The sender itself, for a caller whose turn it is.
        self.alone = sender
        #: Beside a call that takes longer others may begin, because it may hang.
        self.turns = FairLock(self.deadline.total_seconds())

    @contextmanager
    def hold(self) -> Iterator[OpenedSender]:
        """Wait until it is our turn, and yield the sender; the turn ends with the block."""
        with self.turns.hold():
            yield self.alone

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send messages when it is our turn."""
        with self.hold() as sender:
            return sender.send(messages)

    def close(self) -> None:
        """Do nothing, because others may still use the sender: `release` closes it."""

    def release(self) -> None:
        """Close the sender for good."""
        self.alone.close()
