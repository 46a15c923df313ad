"""Dedup keys: after a message with a dedup key was written, no other one with the same key is written for a while."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from outbox.model.message import Message
from outbox.store.database import Channel, Database
from outbox.store.dialects.statements import Script, Statement

PRUNED_AT_ONCE = 1_000

#: Waits for a transaction that has claimed the same key and is still open; the key is free only if that one rolls back.
#: The keys are inserted in their order, so that two writers cannot wait for each other.
_CLAIM = """
    INSERT INTO {dedup} AS known (dedup_key, message_id, expires_at)
    SELECT name, id, {later} FROM {pairs} WHERE true ORDER BY name
    ON CONFLICT (dedup_key) DO UPDATE SET message_id = excluded.message_id, expires_at = excluded.expires_at
    WHERE known.expires_at <= {now}
    RETURNING dedup_key
"""
_KNOWN = "SELECT dedup_key, message_id FROM {dedup} WHERE {chosen}"
#: Rows that another worker is deleting are skipped, because two workers that lock in different orders could wait for
#: each other. A key that was claimed anew since the statement began is read again when it is locked, and stays. The
#: outer condition does not change which keys are deleted; without it the planner reads all of a table of some 100 000
#: keys for each portion.
_PRUNE = """
    DELETE FROM {dedup} WHERE expires_at <= {now} AND dedup_key IN (
        SELECT dedup_key FROM {dedup} WHERE expires_at <= {now} ORDER BY expires_at LIMIT :limit {skip_locked})
"""


class Dedup:
    """The dedup keys of one outbox; each is valid for `window` after its write."""

    def __init__(self, database: Database, window: timedelta) -> None:
        self._database = database
        self._window = window.total_seconds()
        self._claim = database.sql(_CLAIM, pairs=database.dialect.pairs)
        self._known = database.sql(_KNOWN, chosen=database.among("dedup_key", texts="keys"))

    def claim(self, messages: Sequence[Message]) -> Script[dict[int, UUID]]:
        """Claim the keys of these messages; return the places of repetitions, each with the id of the first message."""
        wanted: dict[str, int] = {}
        for place, message in enumerate(messages):
            if message.dedup_key is not None:
                wanted.setdefault(message.dedup_key, place)
        first: dict[str, UUID] = {}
        new: set[int] = set()
        while missing := {key: messages[place].message_id for key, place in wanted.items() if key not in first}:
            # The loop runs again only if a key expired and was pruned between the two statements.
            claimed, known = yield from self._claim_or_find(missing)
            new.update(wanted[key] for key in claimed)
            first |= known
        # Compared by place, because a message that is sent again has the same id as its first write.
        return {
            place: first[message.dedup_key]
            for place, message in enumerate(messages)
            if message.dedup_key is not None and place not in new
        }

    def _claim_or_find(self, wanted: dict[str, UUID]) -> Script[tuple[set[str], dict[str, UUID]]]:
        """Return the keys that are claimed now, and, for every key that is found, the id of its first message."""
        bound = {**self._database.dialect.bind_pairs(list(wanted.items())), "seconds": self._window}
        claimed = {key for (key,) in (yield Statement(self._claim, bound, returns=True))}
        first = {key: wanted[key] for key in claimed}
        others = [key for key in wanted if key not in claimed]
        if others:
            # A statement of its own: the claim's snapshot may be older than the row that it met.
            bound = {"keys": self._database.bind(others)}
            first |= {key: UUID(str(id)) for key, id in (yield Statement(self._known, bound, returns=True))}
        return claimed, first


def prune(channel: Channel) -> int:
    """Delete one portion of the keys that have expired; return how many."""
    return channel.run(_PRUNE, limit=PRUNED_AT_ONCE)
