"""Dedup keys: after a message with a dedup key was written, no other one with the same key is written for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from uuid import UUID

from outbox.model.message import Message
from outbox.store.database import Channel, Database
from outbox.store.dialects.statements import Script, Statement

PRUNED_AT_ONCE = 1_000

_OF_KEY = "SELECT message_id FROM {dedup} WHERE dedup_key = :key"
#: The next message with the key is written.
_FREE = "UPDATE {dedup} SET expires_at = {now} WHERE dedup_key = :key AND message_id = :id"
_MOVE = "UPDATE {dedup} SET message_id = :new, expires_at = {later} WHERE dedup_key = :key AND message_id = :id"
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

    def __init__(self, database: Database, window: timedelta, withdraw: Callable[[UUID], Script[bool]]) -> None:
        """`withdraw`: takes a delayed message back, and returns whether that is in time."""
        self._database = database
        self._window = window.total_seconds()
        self._known = database.sql(_KNOWN, chosen=database.among("dedup_key", texts="keys"))
        self._withdraw = withdraw
        self._of_key, self._free, self._move = map(database.sql, (_OF_KEY, _FREE, _MOVE))
        self._bind_uuid = database.dialect.values.bind_uuid

    def claim(self, messages: Sequence[Message]) -> Script[dict[int, UUID]]:
        """Claim the keys of these messages; return the places of repetitions, each with the id of the first message.

        Of messages that replace each other here, the last counts as the first.
        """
        wanted: dict[str, int] = {}
        replacing: dict[str, int] = {}
        for place, message in enumerate(messages):
            if message.dedup_key is not None:
                wanted.setdefault(message.dedup_key, place)
                if message.dedup == "replace":
                    replacing[message.dedup_key] = place
        wanted |= replacing
        first: dict[str, UUID] = {}
        new: set[int] = set()
        while missing := {key: messages[place].message_id for key, place in wanted.items() if key not in first}:
            # The loop runs again only if a key expired and was pruned between the two statements, or if another writer
            # has claimed a key whose message is to be replaced.
            for key in sorted(missing.keys() & replacing.keys()):
                if (yield from self._given(key, missing[key])):
                    new.add(wanted[key])
                    first[key] = missing.pop(key)
            claimed, known = yield from self._claim_or_find(missing)
            new.update(wanted[key] for key in claimed)
            first |= {
                key: id for key, id in known.items() if key not in replacing or key in claimed or id == missing[key]
            }
        # Compared by place, because a message that is sent again has the same id as its first write.
        return {
            place: first[message.dedup_key]
            for place, message in enumerate(messages)
            if message.dedup_key is not None and place not in new
        }

    def withdraw(self, key: str) -> Script[bool]:
        """Take the message back that a key stands for, and free the key; return whether that is in time."""
        message_id = yield from self._holder(key)
        if message_id is None or not (yield from self._withdraw(message_id)):
            return False
        yield Statement(self._free, {"key": key, "id": self._bind_uuid(message_id)})
        return True

    def _given(self, key: str, message_id: UUID) -> Script[bool]:
        """Give a used key to another message, and take the earlier message back if that is not due.

        Return False if the key is used no more, or is that of the message itself.
        """
        while (earlier := (yield from self._holder(key))) is not None and earlier != message_id:
            yield from self._withdraw(earlier)
            ids = {"new": self._bind_uuid(message_id), "id": self._bind_uuid(earlier)}
            ((moved,),) = yield Statement(self._move, {"key": key, "seconds": self._window, **ids}, counts=True)
            if moved:
                return True
            # Another writer has replaced the message meanwhile.
        return False

    def _holder(self, key: str) -> Script[UUID | None]:
        rows = yield Statement(self._of_key, {"key": key}, returns=True)
        return next((UUID(str(id)) for (id,) in rows), None)

    def _claim_or_find(self, wanted: dict[str, UUID]) -> Script[tuple[set[str], dict[str, UUID]]]:
        """Return the keys that are claimed now, and for every known key the id of the first message."""
        if not wanted:
            return set(), {}
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
