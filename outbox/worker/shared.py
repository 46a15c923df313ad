"""The sender of an Outbox: its relays and its direct sends call one sender in turns."""

from __future__ import annotations

from outbox.senders.opening import OpenedSender
from outbox.worker.calls import Caller


class SharedSender(OpenedSender):
    """A sender that several use: each calls it through a `Caller` beside `caller`, and none of them closes it."""

    def __init__(self, sender: OpenedSender) -> None:
        super().__init__(sender, sender.destination)
        self.caller = Caller(self.send, concurrency=self.concurrency)

    def close(self) -> None:
        """Do nothing, because others may still use the sender: `release` closes it."""

    def release(self) -> None:
        """Close the sender for good."""
        self.caller.close()
        super().close()
