"""Where in the log a moment lies: ids rise with time, nearly, so halving finds it."""

from __future__ import annotations

from datetime import datetime

from outbox.store.database import Database
from outbox.store.dialects.dialect import Channel

_ENDS = "SELECT min(id), max(id) FROM {message}"
_FROM = "SELECT id, created_at FROM {message} WHERE id >= :id ORDER BY id LIMIT 1"


def ids_before(database: Database, channel: Channel, moment: datetime) -> tuple[int, int]:
    """The first id of the log, and the last one before the first row that was created at `moment` or later.

    (1, 0) of an empty log; the last id is smaller than the first where no row is that old.
    """
    lowest, highest = channel.rows(database.sql(_ENDS))[0]
    if lowest is None:
        return 1, 0
    low, high = lowest, highest + 1
    statement = database.sql(_FROM)
    while low < high:
        middle = (low + high) // 2
        # Nothing there any more: purged while we search.
        found = channel.rows(statement, {"id": middle})
        created_at = database.dialect.moment(found[0][1]) if found else None
        if created_at is not None and created_at < moment:
            low = found[0][0] + 1
        else:
            high = middle
    return lowest, low - 1
