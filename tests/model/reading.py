"""The library's own cursor over the log of the model. A read of the log is the definition of a window, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from outbox.model.position import Capture, Position, Progress, Window
from outbox.store.database import Channel
from outbox.store.log.cursor import Cursor
from outbox.store.log.log import Extent, Log, Page
from tests.model.server import Row, Server

_NOW = datetime(2026, 1, 1, tzinfo=UTC)
#: The log of the model needs no connection.
_NO_CHANNEL: Any = None


class ListLog(Log):
    """Reads a list of rows: what `Log` finds by index, this finds by the definition of a window."""

    def __init__(self, server: Server, rows: int) -> None:
        """`rows`: the most that one read returns."""
        self._server = server
        self._most = rows

    def read_on(self, channel: Channel, base: Position) -> Page:
        """Return the rows of the window between `base` and now, if they fit."""
        found = self._window(Window(base, self._server.position()))
        if len(found) > self._most:
            return self._page([], None, seen=len(found), complete=False)
        return self._page(found, found[-1].id if found else None, seen=len(found), complete=True)

    def extent(self, channel: Channel, window: Window) -> Extent:
        """Return the first and the last id of the fresh and of the late rows."""
        found = self._window(window)
        late = [row.id for row in found if row.xid in window.late]
        fresh = [row.id for row in found if row.xid not in window.late]
        return Extent(*((min(part), max(part)) if part else None for part in (fresh, late)))

    def last(self, channel: Channel) -> int:
        """Return the last id of all."""
        return max((row.id for row in self._server.rows), default=0)

    def page(self, channel: Channel, window: Window, extent: Extent, after: int, upto: int) -> Page:
        """Return the next rows of a window."""
        found = [row for row in self._window(window) if after < row.id <= upto]
        some = found[: self._most]
        return self._page(some, some[-1].id if some else None, seen=len(some), complete=len(found) < self._most)

    def _window(self, window: Window) -> list[Row]:
        return [row for row in self._server.rows if window.holds(row.xid)]

    def _page(self, rows: Sequence[Row], reached: int | None, *, seen: int, complete: bool) -> Page:
        capture = Capture(position=self._server.position(), incarnation=str(self._server.incarnation), now=_NOW)
        return Page(
            rows=list[Any](rows),
            reached=reached,
            make=list[Any],
            now=_NOW,
            complete=complete,
            seen=seen,
            capture=capture,
            read_at=0.0,
        )


@lru_cache(maxsize=200_000)
def read(server: Server, progress: Progress, rows: int) -> tuple[tuple[Row, ...], Progress] | None:
    """Return the next batch behind a progress, and the progress of a worker that has settled it; None: nothing new."""
    batch = Cursor(ListLog(server, rows), progress).read(_NO_CHANNEL)
    found: list[Any] = batch.messages
    return (tuple(found), batch.end) if batch.seen else None


def passed(progress: Progress, row: Row) -> bool:
    """Return whether a worker that begins at a progress will not read a row any more."""
    if progress.base.sees(row.xid):
        return True
    return progress.target is not None and progress.target.sees(row.xid) and row.id <= (progress.after or 0)
