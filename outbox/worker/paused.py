"""A subscription that a person has paused: leases are taken to carry out decisions of people, and for nothing else."""

from __future__ import annotations

import logging
import time

from outbox.model.lease import Partition
from outbox.model.subscription import Subscription
from outbox.runtime.named import named
from outbox.store.database import Channel
from outbox.store.subscriptions.decisions import Decisions
from outbox.worker import upkeep

logger = logging.getLogger("outbox")


class Paused:
    """Knows for which partitions of one subscription decisions were looked for in this pause."""

    def __init__(self) -> None:
        #: The open decisions at the last look, with the number of messages on which each was carried out; and the open
        #: decisions for which the lease of a partition was taken.
        self._open: dict[int, int] = {}
        self._looked: dict[Partition, dict[int, int]] = {}
        #: When partitions look again, because a writer may have held up a decision, which shows in no count.
        self._again_at = 0.0

    def some_decided(self, channel: Channel, stored: Subscription) -> bool:
        """Return whether people have decided since the last leases; then the leases are taken for decisions alone.

        Of all partitions, because two workers may each leave a partition to the other worker.
        """
        self._open = Decisions(channel, stored.name).counts()
        if time.monotonic() >= self._again_at:
            self._looked, self._again_at = {}, time.monotonic() + upkeep.DECISIONS_AGAIN
        return bool(self._open) and not all(map(self.has_looked, stored.all_partitions()))

    def has_looked(self, partition: Partition) -> bool:
        """Return whether a partition has looked for the decisions that are open."""
        return self._looked.get(partition) == self._open

    def note_looked(self, partition: Partition) -> None:
        """Note that a partition has looked for the decisions that are open."""
        self._looked[partition] = self._open


def log_pauses(known: Subscription, stored: Subscription) -> None:
    """Log which pauses have begun, and which have ended, between two looks at a subscription."""
    for pause in stored.pauses:
        if pause not in known.pauses:
            about = named("paused", subscription=stored.name, key=pause.key)
            logger.info("subscription %s: %s", stored.name, pause.in_words(), extra=about)
    for pause in known.pauses:
        if pause.key not in {each.key for each in stored.pauses}:
            key = "" if pause.key is None else f" key {pause.key!r}"
            about = named("resumed", subscription=stored.name, key=pause.key)
            logger.info("subscription %s:%s resumed", stored.name, key, extra=about)
