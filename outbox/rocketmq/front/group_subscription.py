"""The subscription of a consumer group to a topic: messages are handed out, and come back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from outbox.rocketmq.asked import Asked
from outbox.rocketmq.expressions import MessageSelector
from outbox.rocketmq.front.polls import Popped
from outbox.store.subscriptions.receipts import Receipt


class GroupSubscription(Protocol):
    """The subscription of a group to a topic.

    Each call waits for the database. Of many receipts a verb says for each whether it is worth something.
    """

    name: str

    def pops(self, choice: MessageSelector) -> Callable[[Sequence[Asked]], Popped]:
        """Return the function that hands out the messages of a choice; what it passes over is passed for all."""

    def ack(self, receipts: Sequence[Receipt]) -> list[bool]:
        """Delete messages that are done."""

    def postpone(self, receipts: Sequence[Receipt], wait: timedelta) -> list[bool]:
        """Let messages be nobody else's for a time from now on."""

    def times(self, receipts: Sequence[Receipt]) -> Mapping[Receipt, datetime]:
        """Return until when messages are nobody else's, by the receipts that are worth something."""

    def renew(self, times: Mapping[Receipt, tuple[datetime, datetime]], wait: timedelta) -> Collection[Receipt]:
        """Move the times of messages from one moment to another, but not a time that somebody else has changed.

        Return the receipts of those that were moved.
        """

    def dead_letter(self, receipts: Sequence[Receipt], error: str) -> list[bool]:
        """Make messages dead letters."""

    def is_known(self) -> bool:
        """Return whether the group has received of the topic before."""

    def out(self, ids: Collection[int]) -> set[int]:
        """Return which messages are in anybody's hands, or come again: they are neither done nor dead letters."""

    def give_back(self, popped: Popped) -> None:
        """Let others have messages whose calls have ended before their answers; a failure is logged."""
