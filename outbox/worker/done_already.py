"""The port by which a worker learns which messages are done already, so that it does not handle them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.position import Position


class Finished(Protocol):
    """Knows which messages of a subscription are done already, by their writer or by a transaction's verdict."""

    def finished(self, messages: Sequence[Message]) -> set[int]:
        """Return the log ids of those among these messages that are done already."""

    def dead(self, subscription: str, limit: int) -> list[tuple[int, str | None]]:
        """Return log id and key of dead letters of a subscription that are done by now, `limit` at most."""

    def prune(self, lease: Lease, stored_base: Position) -> bool:
        """Delete what is stored about messages before the stored base; return whether there may be more of it."""
