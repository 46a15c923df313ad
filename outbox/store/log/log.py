"""The log: append-only, read by position. Callers of this module do not depend on the kind of database."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from operator import itemgetter
from typing import Any

from outbox.errors import DatabaseError, StandbyError
from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message
from outbox.model.position import Capture, Position, Window
from outbox.model.subscription import EVERYTHING, Selection
from outbox.store.database import Database
from outbox.store.dialects.dialect import COLUMNS, Channel
from outbox.store.dialects.statements import Row

_TOPIC, _BODY, _DIRECT = 2, 6, 11
_ID = itemgetter(0)
_FORBIDDEN = {
    "standby": "this server is a standby: its snapshots miss open transactions; connect to the primary",
    "written": "a position cannot be captured in a transaction that has written; use a connection of its own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one read returns: rows, and bytes of bodies (twice that for a moment, while bodies are fetched)."""

    rows: int = 1000
    bytes: int = 8 * 1024 * 1024

    @property
    def inline(self) -> int:
        """The size up to which a body comes with its row: `rows` + 1 such bodies cannot exceed `bytes`."""
        return self.bytes // (self.rows + 1)


@dataclass(frozen=True, kw_only=True)
class Page:
    """The result of a read: rows in the order of the log. `messages` are made from them at the first access.

    `complete`: there was nothing else to read; if not, everything up to the id `reached` is here. (If too many rows
    were there for one read, `reached` is None, and the window has to be read page by page.) `seen` counts also the rows
    that the selection left out.
    """

    rows: list[Row]
    reached: int | None
    make: Callable[[Sequence[Row]], list[Message]]
    now: datetime
    complete: bool
    seen: int
    capture: Capture | None = None
    #: The moment of the read, by the monotonic clock of this machine.
    read_at: float = field(default_factory=time.monotonic)

    @cached_property
    def messages(self) -> list[Message]:
        """The messages that the subscription selects."""
        return self.make(self.rows)


@dataclass(frozen=True, slots=True)
class Extent:
    """The first and the last id of a window's rows, of its fresh part and of its late part; None: no rows."""

    fresh: tuple[int, int] | None
    late: tuple[int, int] | None

    @property
    def last(self) -> int:
        """The last id of the window; 0 when it holds no rows."""
        return max(part[1] for part in (self.fresh, self.late, (0, 0)) if part)

    @property
    def first(self) -> int:
        """The first id of the window; 0 when it holds no rows."""
        return min((part[0] for part in (self.fresh, self.late) if part), default=0)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows with their bodies; every row up to the id `reached` is here, and if `whole`, every row that was read."""

    rows: list[Row]
    reached: int | None
    whole: bool


_NOTHING = _Part([], None, whole=True)


class Log:
    """Reads the log, on channels that the caller passes and nobody else uses."""

    def __init__(self, database: Database, limits: Limits = Limits(), selection: Selection = EVERYTHING) -> None:
        self._database = database
        self._limits = limits
        self._selection = selection
        topics, tags = selection.topics, selection.tags
        narrow = (topics, tags, selection.only) != (None, None, None)
        dialect = database.dialect
        self._capture = database.sql(dialect.capture)
        self._read_on = database.sql(dialect.read_on_chosen if narrow else dialect.read_on)
        self._read_on_fresh = database.sql(dialect.read_on_chosen if narrow else dialect.read_on_fresh)
        self._page = database.sql(dialect.page)
        self._page_late = database.sql(dialect.page_late)
        self._extent = database.sql(dialect.extent)
        self._bodies = database.sql(_BODIES, chosen=database.among("id", numbers="ids"))
        self._at = database.sql(_AT, chosen=database.among("id", numbers="ids"))
        # An empty text skips and hides nothing: no subscription has an empty name, and no message an empty topic. Half
        # messages are hidden unless topics are named, because only a checker handles them.
        self._skips = selection.skips or ""
        self._hidden = HALF_TOPIC if topics is None else ""
        self._common: dict[str, Any] = {
            "inline": self._limits.inline,
            "topics": None if topics is None else database.bind(topics),
            "tags": None if tags is None else database.bind(tags),
            "skips": self._skips,
            "only": selection.only,
            "hidden": self._hidden,
        }

    def now(self, channel: Channel) -> Capture:
        """Capture the position of now, which sees all that was committed before this call."""
        snapshot, incarnation, forbidden, now = channel.rows(self._capture)[0]
        return self._captured(snapshot, incarnation, forbidden, now)

    def read_on(self, channel: Channel, base: Position) -> Page:
        """Capture, and read everything that was committed since `base`, in one statement.

        The position is the statement's own snapshot, so the rows that it reads are exactly those that the position
        sees.
        """
        limit = self._limits.rows + 1
        parameters = {**self._common, "head": base.head, "open": list(base.open), "limit": limit}
        statement = self._read_on if base.open else self._read_on_fresh
        head, rows = _split(channel.rows(statement, parameters))
        capture = self._captured(head[2], head[3], head[4], head[8])
        seen = len(rows) if head[0] is None else head[0]
        if seen >= limit:
            return self._reading(_NOTHING, capture.now, complete=False, seen=seen, capture=capture)
        part = self._fitting(channel, rows)
        return self._reading(part, capture.now, complete=part.whole, seen=seen, capture=capture)

    def nothing(self, capture: Capture | None) -> Page:
        """Return a page without rows, for a moment at which no rows were read."""
        now = datetime.now(UTC) if capture is None else capture.now
        return self._reading(_NOTHING, now, complete=True, seen=0, capture=capture)

    def at(self, channel: Channel, ids: Sequence[int]) -> Page:
        """Read the messages with these ids, as many as the limits allow, but at least one."""
        rows = channel.rows(self._at, {**self._common, "ids": self._database.bind(ids)})
        part = self._fitting(channel, rows)
        return self._reading(part, datetime.now(UTC), complete=part.whole, seen=len(rows))

    def extent(self, channel: Channel, window: Window) -> Extent:
        """Find out where the rows of a window lie; costs one pass over its index entries."""
        first, last, late_first, late_last = channel.rows(self._extent, _bounds(window))[0]
        fresh = None if first is None else (first, last)
        return Extent(fresh, None if late_first is None else (late_first, late_last))

    def page(self, channel: Channel, window: Window, extent: Extent, after: int, upto: int) -> Page:
        """Read the rows of a window with ids above `after` and up to `upto`, as many as the limits allow."""
        late = extent.late is not None and after < extent.late[1]
        limit = self._limits.rows
        first = extent.fresh[0] if extent.fresh else upto + 1
        span = {"after": after, "upto": upto, "first": first, "limit": limit}
        statement = self._page_late if late else self._page
        clock, rows = _split(channel.rows(statement, {**self._common, **_bounds(window), **span}))
        part = self._fitting(channel, rows)
        complete = part.whole and len(rows) < limit
        return self._reading(part, self._moment(clock[8]), complete=complete, seen=len(rows))

    def _reading(
        self, part: _Part, now: datetime, *, complete: bool, seen: int, capture: Capture | None = None
    ) -> Page:
        make = self._database.dialect.messages
        return Page(
            rows=part.rows, reached=part.reached, make=make, now=now, complete=complete, seen=seen, capture=capture
        )

    def _fitting(self, channel: Channel, rows: list[Row]) -> _Part:
        """Sort the rows, and fetch the bodies that were too large to come along: as many as fit, but at least one."""
        rows.sort(key=_ID)
        bare = [row for row in rows if row[_BODY] is None]
        if not bare:
            return _Part(rows, rows[-1][0] if rows else None, whole=True)
        left_out = {row[0] for row in bare if row[_TOPIC] == self._hidden or row[_DIRECT] == self._skips}
        bodies = self._large_bodies(channel, [row[0] for row in bare if row[0] not in left_out])
        fitting: list[Row] = []
        reached = None
        for row in rows:
            id = row[0]
            if row[_BODY] is not None:
                fitting.append(row)
            elif id in bodies:
                fitting.append((*row[:_BODY], bodies[id], *row[_BODY + 1 :]))
            elif id not in left_out:
                return _Part(fitting, reached, whole=False)
            reached = id
        return _Part(fitting, reached, whole=True)

    def _large_bodies(self, channel: Channel, ids: list[int]) -> dict[int, bytes]:
        if not ids:
            return {}
        parameters = {"ids": self._database.bind(ids), "bytes": self._limits.bytes}
        return {id: body for id, body in channel.rows(self._bodies, parameters)}  # noqa: C416 - rows are tuples of any length

    def _captured(self, snapshot: str, incarnation: str, forbidden: str | None, now: Any) -> Capture:
        if forbidden == "standby":
            raise StandbyError(_FORBIDDEN[forbidden])
        if forbidden is not None:
            raise DatabaseError(_FORBIDDEN[forbidden])
        return Capture(position=Position.parse(snapshot), incarnation=incarnation, now=self._moment(now))

    def _moment(self, value: Any) -> datetime:
        moment = self._database.dialect.moment(value)
        assert moment is not None
        return moment


def _split(rows: list[Row]) -> tuple[Row, list[Row]]:
    """Separate the row that carries the capture or the clock (it has no message_id) from the messages."""
    at = 0 if rows[0][1] is None else next(i for i, row in enumerate(rows) if row[1] is None)
    return rows[at], rows[:at] + rows[at + 1 :]


def _bounds(window: Window) -> dict[str, Any]:
    """Return a window as parameters for the statements that read its pages."""
    head, target = window.fresh
    return {"head": head, "target": target, "open": list(window.fresh_open), "late": list(window.late)}


_AT = f"""
    SELECT {COLUMNS.format(body="CASE WHEN length(body) <= :inline THEN body END", direct="direct")}
    FROM {{message}} WHERE {{chosen}} AND direct = :only ORDER BY id
"""
#: Large bodies, as many as the limit of bytes allows, but at least one; by primary key. Bodies stay out of the window
#: function, because SQLite copies everything that goes through one.
_BODIES = """
    SELECT id, body FROM {message} WHERE {chosen} AND id IN (
        SELECT id FROM (
            SELECT id, sum(length(body)) OVER (ORDER BY id) AS cut, row_number() OVER (ORDER BY id) AS nth
            FROM {message} WHERE {chosen}) AS c
        WHERE cut <= :bytes OR nth = 1)
    ORDER BY id
"""
