"""A sender that belongs to an Outbox: its relay and its direct sends use it in turns, and neither closes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outbox.model.message import Message
from outbox.model.verdict import Verdict
from outbox.runtime.fair_lock import FairLock
from outbox.senders.port import Sender, deadline_of


class SerializedSender:
    """Calls another sender, for one caller at a time."""

    def __init__(self, sender: Sender, destination: str) -> None:
        self._sender = sender
        self.destination = destination
        self.deadline = deadline_of(sender)
        #: Beside a call that takes longer others may begin, because it may hang.
        self.turns = FairLock(self.deadline.total_seconds())

    @property
    def alone(self) -> Sender:
        """The sender itself, for a caller whose turn it is."""
        return self._sender

    @contextmanager
    def hold(self) -> Iterator[Sender]:
        """Wait until it is our turn, and yield the sender; the turn ends with the block."""
        with self.turns.hold():
            yield self._sender

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send messages when it is our turn."""
        with self.hold() as sender:
            return sender.send(messages)

    def close(self) -> None:
        """Do nothing, because others may still use the sender: `release` closes it."""

    def release(self) -> None:
        """Close the sender for good."""
        self._sender.close()
