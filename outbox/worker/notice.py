"""The reason why a worker does not work, where `outbox status` reads it."""

from __future__ import annotations

from contextlib import closing, suppress

from outbox.model.verdict import describe
from outbox.store.database import Channel, Database
from outbox.store.subscriptions.leases import Leases

_MOST = 500


class Notice:
    """The notice of one subscription, on its leases."""

    def __init__(self, database: Database, subscription: str) -> None:
        self._database = database
        self._subscription = subscription
        #: True when a worker, perhaps this one, has written a notice that nobody has withdrawn.
        self._written = False

    def write(self, text: str, since: float = 0.0) -> None:
        """Say why this worker does not work. `since`: for how many seconds it does not work already."""
        self._written = True
        with suppress(Exception), closing(self._database.open()) as channel:
            Leases(channel).note(self._subscription, describe(text)[:_MOST], since=since)

    def seen(self, notice: str | None) -> None:
        """Remember to withdraw a notice that was found on a lease."""
        self._written = self._written or notice is not None

    def withdraw(self, channel: Channel) -> None:
        """Remove the notice, because a worker works."""
        if self._written:
            Leases(channel).note(self._subscription, None)
            self._written = False
