"""The dedup keys of messages that people discard: the next message with such a key is to be written."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outbox.store.database import Channel

#: No index has the message ids: people discard rarely, and writers would have to pay for the index.
_KEYS = """
    SELECT p.id, d.dedup_key FROM {parked} AS p JOIN {dedup} AS d ON d.message_id = p.message_id
    WHERE p.subscription = :subscription AND {chosen}
"""
#: By primary key. A key that was claimed anew meanwhile is that of another message, and stays.
_THEIRS = """
    FROM {dedup} WHERE {among_keys}
      AND message_id IN (SELECT message_id FROM {parked} WHERE subscription = :subscription AND {id_in_ids})
"""
_FREE = "DELETE FROM {dedup} WHERE dedup_key IN (SELECT dedup_key {theirs} {skip})"
_KEPT = "SELECT dedup_key {theirs}"


def free_keys(channel: Channel, subscription: str, ids: Collection[int], *, waits: bool) -> set[int]:
    """Free the dedup keys of parked messages; return the ids of the messages whose keys others have locked.

    `waits`: wait for the locks instead.
    """
    database, bound = channel.database, dict[str, Any](subscription=subscription, ids=channel.database.bind(ids))
    found = channel.rows(database.sql(_KEYS, chosen=database.among("p.id", numbers="ids")), **bound)
    if not found:
        return set()
    bound["keys"] = database.bind(key for _, key in found)
    theirs = database.sql(_THEIRS, among_keys=database.among("dedup_key", texts="keys"))
    channel.run(database.sql(_FREE, theirs=theirs, skip="" if waits else database.dialect.locks.skip_locked), **bound)
    kept = {key for (key,) in channel.rows(database.sql(_KEPT, theirs=theirs), **bound)}
    return {id for id, key in found if key in kept}
