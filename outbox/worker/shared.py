"""The sender of an Outbox: all relays of a process call one sender in turns."""

from __future__ import annotations

from outbox.senders.opening import Destination, OpenedSender
from outbox.worker.calls import Caller


class SharedSender(OpenedSender):
    """A sender of several users: each calls through `caller`, and none closes the sender."""

    def __init__(self, sender: OpenedSender) -> None:
        super().__init__(sender, sender.destination)
        self.caller = Caller(self.concurrency)

    def close(self) -> None:
        """Do nothing, because others may still use the sender: `release` is the end."""

    def release(self) -> None:
        """Close the sender for good."""
        self.caller.close()
        super().close()


def caller_of(destination: Destination, sender: OpenedSender) -> Caller:
    """Return the caller of a destination: of a shared sender the shared caller, in turns with all users."""
    return destination.caller if isinstance(destination, SharedSender) else Caller(sender.concurrency)
