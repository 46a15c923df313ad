"""Search for a moment in the log. Ids rise nearly with time, so a binary search finds it."""

from __future__ import annotations

from datetime import datetime

from outbox.store.database import Channel

_ENDS = "SELECT min(id), max(id) FROM {message}"
_FROM = "SELECT id, created_at FROM {message} WHERE id >= :id ORDER BY id LIMIT 1"


def ids_before(channel: Channel, moment: datetime) -> tuple[int, int]:
    """Return the first id of the log, and the last id before the first row that was created at `moment` or later.

    Of an empty log this is (1, 0). The second is smaller than the first where no row is older than `moment`.
    """
    lowest, highest = channel.rows(_ENDS)[0]
    if lowest is None:
        return 1, 0
    low, high = lowest, highest + 1
    while low < high:
        middle = (low + high) // 2
        # No row from here on means that they were purged during the search.
        found = channel.rows(_FROM, id=middle)
        created_at = channel.database.dialect.moment(found[0][1]) if found else None
        if created_at is not None and created_at < moment:
            low = found[0][0] + 1
        else:
            high = middle
    return lowest, low - 1
