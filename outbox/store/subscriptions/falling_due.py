"""Delayed messages that are due: each joins the end of its key's unit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outbox.model.lease import Partition
from outbox.store.database import Channel
from outbox.store.dialects.dialect import OF_SLOTS, slots_of

_DUE = """
    SELECT id, key FROM {parked}
    WHERE subscription = :subscription AND state = 'delayed' AND key IS NOT NULL AND due_at <= {now} {of_slots}
    ORDER BY due_at, id LIMIT :limit
"""
#: The messages in the order in which they fell due.
_PLACED = """
    (SELECT d.id AS due_id, row_number() OVER (PARTITION BY d.key ORDER BY d.due_at, d.id) + coalesce(
         (SELECT max(e.place) FROM {parked} AS e WHERE e.subscription = :subscription AND e.unit = d.key), 0)
         AS due_place
     FROM {parked} AS d WHERE d.subscription = :subscription AND d.state = 'delayed' AND d.key IS NOT NULL
       AND d.due_at <= {now} AND {chosen})
    AS placed
"""
_JOINED = {
    "changes": "state = NULL, unit = key, due_at = NULL, place = due_place",
    "joined": "subscription = :subscription AND id = due_id",
}


class FallingDue:
    """The delayed messages of one subscription; with a partition, those in its slots."""

    def __init__(self, channel: Channel, subscription: str, partition: Partition | None = None) -> None:
        self._channel = channel
        self._database = channel.database
        slots = slots_of(partition)
        self._common: dict[str, Any] = {"subscription": subscription, **slots}
        self._of_slots = f"AND {OF_SLOTS}" if slots else ""

    def due(self, limit: int) -> dict[int, str]:
        """Return at most `limit` messages that are due, with their keys. Without a key a message stands for itself."""
        statement = self._database.sql(_DUE, of_slots=self._of_slots)
        return dict(self._channel.rows(statement, **self._common, limit=limit))

    def join(self, ids: Collection[int]) -> None:
        """Put those of these messages that are delayed, and due, at the end of their keys' units.

        Call `Parked.advance` for the keys afterwards, in the same transaction.
        """
        placed = self._database.sql(_PLACED, chosen=self._database.among("d.id", numbers="ids"))
        parts = {"table": self._database.names["parked"], "source": placed, **_JOINED}
        statement = self._database.sql(self._database.dialect.writes.update_from, **parts)
        self._channel.run(statement, **self._common, ids=self._database.bind(ids))
