"""The size of the log: its rows, its bytes, and the age of the oldest row. The cost does not grow with the log."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from outbox.store.database import Channel

#: By probes of the primary key.
_ENDS = """
    SELECT (SELECT max(id) FROM {message}) - id + 1, created_at FROM {message} ORDER BY id LIMIT 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSize:
    """The size of the log. `rows`: at most so many, because ids of rolled-back messages count, too.

    `bytes`: of the table and its indexes; on SQLite, of the file. `oldest`: when the first row was written.
    """

    rows: int
    bytes: int
    oldest: datetime | None


def log_size(channel: Channel) -> LogSize:
    """Return the size of the log."""
    database = channel.database
    ends = channel.rows(_ENDS)
    size = int(channel.rows(database.sql(database.dialect.home.log_bytes))[0][0])
    if not ends:
        return LogSize(rows=0, bytes=size, oldest=None)
    rows, oldest = ends[0]
    return LogSize(rows=rows, bytes=size, oldest=database.moment(oldest))
