"""Dedup keys: for a while after a message with one was written, another with the same is not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from outbox.model.message import Message
from outbox.store.database import Database
from outbox.store.dialects.dialect import Channel
from outbox.store.dialects.statements import Script, Statement

PRUNED_AT_ONCE = 1_000

#: Waits for a transaction that has claimed the same key and is not over; what it does decides. In the order of the
#: keys, so that two writers cannot wait for each other.
_CLAIM = """
    INSERT INTO {dedup} AS known (dedup_key, message_id, expires_at)
    SELECT name, id, {expires} FROM {pairs} WHERE true ORDER BY name
    ON CONFLICT (dedup_key) DO UPDATE SET message_id = excluded.message_id, expires_at = excluded.expires_at
    WHERE known.expires_at <= {now}
    RETURNING dedup_key
"""
_KNOWN = "SELECT dedup_key, message_id FROM {dedup} WHERE {chosen}"
#: What another worker is deleting is left to it: in an order of their own the two could wait for each other. A key that
#: was claimed anew since the statement began is read again when it is locked, and stays. The outer condition does not
#: change which keys go; without it the planner reads all of a table of some 100 000 keys for each portion.
_PRUNE = """
    DELETE FROM {dedup} WHERE expires_at <= {now} AND dedup_key IN (
        SELECT dedup_key FROM {dedup} WHERE expires_at <= {now} ORDER BY expires_at LIMIT :limit {unlocked})
"""


class Dedup:
    """The dedup keys of one outbox, each good for `window` from its write on."""

    def __init__(self, database: Database, window: timedelta) -> None:
        self._database = database
        self._window = window.total_seconds()
        expires = database.later(":seconds")
        self._claim = database.sql(_CLAIM, expires=expires, pairs=database.dialect.pairs)
        self._known = database.sql(_KNOWN, chosen=database.among("dedup_key", texts="keys"))

    def claim(self, messages: Sequence[Message]) -> Script[dict[int, UUID]]:
        """Claim the keys of these messages. Returns the places of repetitions in the list, each with its first's id."""
        wanted: dict[str, int] = {}
        for place, message in enumerate(messages):
            if message.dedup_key is not None:
                wanted.setdefault(message.dedup_key, place)
        first: dict[str, UUID] = {}
        new: set[int] = set()
        while missing := {key: messages[place].message_id for key, place in wanted.items() if key not in first}:
            # Once more only where a key expired and was pruned between the two statements.
            claimed, known = yield from self._claim_or_find(missing)
            new.update(wanted[key] for key in claimed)
            first |= known
        # Not told by their ids: a message that is sent again has its own.
        return {
            place: first[message.dedup_key]
            for place, message in enumerate(messages)
            if message.dedup_key is not None and place not in new
        }

    def _claim_or_find(self, wanted: dict[str, UUID]) -> Script[tuple[set[str], dict[str, UUID]]]:
        """Which keys are claimed now; and of all that can be told, the id of the first message."""
        bound = {**self._database.dialect.bind_pairs(list(wanted.items())), "seconds": self._window}
        claimed = {key for (key,) in (yield Statement(self._claim, bound, returns=True))}
        first = {key: wanted[key] for key in claimed}
        others = [key for key in wanted if key not in claimed]
        if others:
            # A statement of its own: the claim's snapshot may be older than the row that it met.
            bound = {"keys": self._database.bind(others)}
            first |= {key: UUID(str(id)) for key, id in (yield Statement(self._known, bound, returns=True))}
        return claimed, first


def prune(database: Database, channel: Channel) -> int:
    """Delete keys that have expired, a portion at a time; returns how many."""
    statement = database.sql(_PRUNE, unlocked=database.dialect.skip_locked)
    return channel.run(statement, {"limit": PRUNED_AT_ONCE})
