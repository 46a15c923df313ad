"""What is done already: a port by which a worker learns what it need not hand over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.position import Position
from outbox.store.dialects.dialect import Channel


class Finished(Protocol):
    """Knows which messages of a subscription somebody else has dealt with: their writer, or a transaction's verdict."""

    def finished(self, channel: Channel, messages: Sequence[Message]) -> set[int]:
        """Return the log ids of those among these messages."""

    def dead(self, channel: Channel, subscription: str, limit: int) -> list[tuple[int, str | None]]:
        """Return log id and key of dead letters of a subscription that have been dealt with since, `limit` at most."""

    def prune(self, channel: Channel, lease: Lease, stored_base: Position) -> bool:
        """Delete what is known of messages before the stored base; return whether there may be more of it."""
