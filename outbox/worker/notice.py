"""The reason why a worker does not work, where `outbox status` reads it."""

from __future__ import annotations

from contextlib import closing, suppress

from outbox.model.verdict import describe
from outbox.runtime.text import one_line, without_server
from outbox.store.database import Channel, Database
from outbox.store.subscriptions.leases import Leases
from outbox.telemetry.events import DestinationAway, Event
from outbox.telemetry.failure_log import Words

_MOST = 500
#: A shorter pause is written to the log of the process, but not to the database.
_PAUSE_SECONDS = 1.0


class Notice:
    """The notice of one subscription, on its leases; listens to the waits of the worker."""

    def __init__(self, database: Database, subscription: str, words: Words) -> None:
        """`words`: the sentences for the subscription."""
        self._database = database
        self._subscription = subscription
        self._words = words
        #: True when a worker, perhaps this one, has written a notice that nobody has withdrawn.
        self._written = False
        #: True when it was told what the worker waits for, in this pause.
        self._waits = False

    def told(self, event: Event) -> None:
        """Write why the worker waits, once for each pause."""
        if isinstance(event, DestinationAway) and event.pauses and not self._waits:
            outage = max(event.outages, key=lambda each: each.seconds)
            if outage.seconds >= _PAUSE_SECONDS:
                self._waits = True
                why = one_line(without_server(outage.error, event.destination))
                self.write(f"{self._words.awaited(outage.topic)}: {why}", outage.seconds)

    def write(self, text: str, since: float = 0.0) -> None:
        """Say why the worker does not work. `since`: for how many seconds already."""
        self._written = True
        with suppress(Exception), closing(self._database.open()) as channel:
            Leases(channel).note(self._subscription, describe(text)[:_MOST], since=since)

    def seen(self, notice: str | None) -> None:
        """Remember to withdraw a notice that was found on a lease."""
        self._written = self._written or notice is not None

    def withdraw(self, channel: Channel) -> None:
        """Remove the notice, because a worker works."""
        self._waits = False
        if self._written:
            Leases(channel).note(self._subscription, None)
            self._written = False
