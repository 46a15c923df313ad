"""Reads the status of the log. The cost does not grow with the log."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta

from outbox.errors import SubscriptionError
from outbox.model.position import Position
from outbox.model.status import LogStatus
from outbox.store.database import Channel
from outbox.store.identity import first_row
from outbox.store.log.log import ids_before, last_id
from outbox.store.operations.purge import first_unread, stored_bases

_OLDEST = "SELECT id, created_at FROM {message} ORDER BY id LIMIT 1"
_PURGED = "SELECT purged_at, keep_ms, keep_dead_ms FROM {meta}"


def log_status(channel: Channel, now: datetime) -> LogStatus:
    """Return the status of the log; `now`: by the database's clock."""
    read = channel.database.dialect.clock.read
    oldest, last, (purged_at, keep, dead) = channel.rows(_OLDEST), last_id(channel), first_row(channel, _PURGED)
    first, written = (oldest[0][0], read(oldest[0][1])) if oldest else (1, None)
    name = channel.database.names["message"].replace("'", "''")
    size = channel.database.sql("SELECT {size}", size=channel.database.dialect.home.size.format(log=f"'{name}'"))
    before = None if keep is None else now - timedelta(milliseconds=keep)
    return LogStatus(
        rows=max(0, last - first + 1),
        bytes=channel.rows(size)[0][0],
        oldest=written,
        purged_at=read(purged_at),
        keep_seconds=None if keep is None else keep / 1000,
        keep_dead_seconds=None if dead is None else dead / 1000,
        held_back={} if before is None or written is None or written >= before else _held_back(channel, before),
    )


def _held_back(channel: Channel, before: datetime) -> dict[str, int]:
    """Return about how many of the messages from `before` a moment each subscription has not passed."""
    last, bases, found = ids_before(channel, before)[1], list[tuple[str, Position]](), dict[str, int]()
    with suppress(SubscriptionError):  # nobody reads the log
        bases = stored_bases(channel)
    for name, base in bases:
        unread = first_unread(channel, base)
        if unread is not None and unread <= last:
            found[name] = max(found.get(name, 0), last - unread + 1)
    return found
