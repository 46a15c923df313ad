"""A sender that belongs to an Outbox: its relay and its direct sends use it in turns, and neither closes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outbox.model.message import Message
from outbox.model.verdict import Verdict
from outbox.runtime.fair_lock import FairLock
from outbox.senders.port import Sender, deadline_of


class SerializedSender:
    """Passes calls on, one at a time."""

    def __init__(self, sender: Sender, destination: str) -> None:
        self._sender = sender
        self.destination = destination
        self.deadline = deadline_of(sender)
        # Others begin beside a call that takes longer: it may hang.
        self._lock = FairLock(self.deadline.total_seconds())

    @property
    def alone(self) -> Sender:
        """The sender itself, for those who have the turn."""
        return self._sender

    @contextmanager
    def hold(self) -> Iterator[Sender]:
        """The sender, when it is our turn; until the end nobody else calls it."""
        with self._lock.hold():
            yield self._sender

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Hand messages over when it is our turn."""
        with self.hold() as sender:
            return sender.send(messages)

    def close(self) -> None:
        """Others may be using it still: `release` closes it."""

    def release(self) -> None:
        """Close it for good."""
        self._sender.close()
