"""The library's own reading of the log of the model: a statement is answered by its meaning, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from outbox.model.command import Commands
from outbox.model.position import Progress
from outbox.store.log.cursor import Cursor
from outbox.store.log.log import Limits, Log
from tests.model.server import Row, Server

_NOW = datetime(2026, 1, 1, tzinfo=UTC)
_STATEMENTS = ("read_on", "read_on_fresh", "page", "page_late", "extent")


def _messages(rows: Iterable[Any]) -> list[Any]:
    """Return the rows of the model, each of which stands for its message."""
    return [row[1] for row in rows]


def _columns(message: object = None, *, id: int | None = None, state: tuple[str, str] | None = None) -> Any:
    """Return a row as a statement returns it: of a message, of the clock, or of a capture."""
    snapshot, incarnation = state or (None, None)
    return id, message, snapshot, incarnation, None, None, b"", None, _NOW, None, None, None


#: The statements of its dialect are names.
_DATABASE: Any = SimpleNamespace(
    dialect=SimpleNamespace(
        reads=SimpleNamespace(**{name: name for name in _STATEMENTS}, messages=_messages), values=None
    ),
    sql=lambda statement, **_: statement,
    moment=lambda moment: moment,
    commands=Commands(),
)


class ListChannel:
    """Answers what a `Log` asks for, from the rows of a server."""

    database = _DATABASE

    def __init__(self, server: Server) -> None:
        self._server = server

    def rows(self, statement: str, **bound: Any) -> list[Any]:
        """Answer a statement."""
        if statement in ("read_on", "read_on_fresh"):
            return [self._capture(), *self._read_on(**bound)]
        if statement in ("page", "page_late"):
            late = bound.pop("late")
            clock = _columns(state=("", self._who[0]))
            return [clock, *self._page(late if statement == "page_late" else (), **bound)]
        if statement == "extent":
            return [(*self._extent(**bound), *self._who)]
        first, last = _ends([row.id for row in self._server.rows])
        assert "max(id)" in statement
        return [(first, last, *self._who) if "min(id)" in statement else (last, *self._who)]

    @property
    def _who(self) -> tuple[str, None]:
        return str(self._server.incarnation), None

    def _capture(self) -> Any:
        return _columns(state=(str(self._server.position()), self._who[0]))

    def _read_on(self, head: int, open: list[int], limit: int, **_: object) -> list[Any]:
        return self._some((row for row in self._server.rows if row.xid in open or row.xid >= head), limit)

    def _page(
        self, late: Iterable[int], head: int, target: int, open: list[int], after: int, upto: int, **bound: Any
    ) -> list[Any]:
        """Return rows between two ids: of the late transactions, and of the fresh ones from the id `first` on."""
        fresh = (row for row in self._fresh(head, target, open) if row.id >= bound["first"])
        found = {row for row in self._server.rows if row.xid in late} | set(fresh)
        between = sorted((row for row in found if after < row.id <= upto), key=lambda row: row.id)
        return self._some(between, bound["limit"])

    def _extent(self, head: int, target: int, open: list[int], late: list[int]) -> Any:
        fresh = [row.id for row in self._fresh(head, target, open)]
        behind = [row.id for row in self._server.rows if row.xid in late]
        return *_ends(fresh), *_ends(behind)

    def _fresh(self, head: int, target: int, open: list[int]) -> list[Row]:
        return [row for row in self._server.rows if head <= row.xid < target and row.xid not in open]

    def _some(self, rows: Iterable[Row], limit: int) -> list[Any]:
        return [_columns(row, id=row.id) for row in list(rows)[:limit]]


def _ends(ids: list[int]) -> tuple[int | None, int | None]:
    return (min(ids), max(ids)) if ids else (None, None)


@lru_cache(maxsize=200_000)
def read(
    server: Server, progress: Progress, rows: int, log: type[Log] = Log
) -> tuple[tuple[Row, ...], Progress] | None:
    """Return the next batch behind a progress, and the progress of a worker that has settled it; None: nothing new."""
    channel: Any = ListChannel(server)
    batch = Cursor(log(Limits(rows=rows)), progress).read(channel)
    found: list[Any] = batch.messages
    return (tuple(found), batch.end) if batch.seen else None


def passed(progress: Progress, row: Row) -> bool:
    """Return whether a worker that begins at a progress will not read a row any more."""
    if progress.base.sees(row.xid):
        return True
    return progress.target is not None and progress.target.sees(row.xid) and row.id <= (progress.after or 0)
