"""Dedup keys: after a message with a dedup key was written, no other one with the same key is written for a while."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from outbox.model.message import Message
from outbox.store.database import Channel, Database
from outbox.store.dialects.statements import Script, Statement

PRUNED_AT_ONCE = 1_000

_KNOWN = "SELECT dedup_key, message_id FROM {dedup} WHERE {chosen}"
#: Rows that another worker is deleting are skipped, because two workers that lock in different orders could wait for
#: each other. A key that was claimed anew since the statement began is read again when it is locked, and stays. The
#: outer condition does not change which keys are deleted; without it the planner reads all of a table of some 100 000
#: keys for each portion.
_PRUNE = """
    DELETE FROM {dedup} WHERE expires_at <= {now} AND dedup_key IN (SELECT dedup_key FROM (
        SELECT dedup_key FROM {dedup} WHERE expires_at <= {now} ORDER BY expires_at LIMIT :limit {skip_locked}) AS d)
"""


class Dedup:
    """The dedup keys of one outbox; each is valid for `window` after its write."""

    def __init__(self, database: Database, window: timedelta) -> None:
        self._database = database
        self._window = window.total_seconds()
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
        """Return the keys that are claimed now, and for every known key the id of the first message."""
        claim = self._database.dialect.writes.claim
        claimed = yield from claim(self._database.names, list(wanted.items()), self._window)
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
