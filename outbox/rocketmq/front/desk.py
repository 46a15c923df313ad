"""A desk: where the messages of one consumer group of one topic are handed out, and come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Protocol

from outbox.model.message import Message
from outbox.rocketmq.asked import Asked
from outbox.rocketmq.expressions import MessageSelector
from outbox.rocketmq.front.polls import Popped
from outbox.store.subscriptions.receipts import Receipt


class Desk(Protocol):
    """Each call waits for the database. Of many receipts a verb says for each whether it is worth something."""

    def pops(self, choice: MessageSelector) -> Callable[[Sequence[Asked]], Popped]:
        """Return the function that hands out the messages of a choice; what it passes over is passed for all."""

    def ack(self, receipts: Sequence[Receipt]) -> list[bool]:
        """Delete messages that are done."""

    def postpone(self, receipts: Sequence[Receipt], wait: timedelta) -> list[bool]:
        """Let messages be nobody else's for a time from now on."""

    def dead_letter(self, receipts: Sequence[Receipt], error: str) -> list[bool]:
        """Make messages dead letters."""

    def is_out(self, id: int) -> bool:
        """Return whether a message is in anybody's hands, or comes again: it is neither done nor a dead letter."""

    def give_back(self, receipt: str, messages: Collection[Message]) -> None:
        """Let others have messages whose call has ended before its answer."""
