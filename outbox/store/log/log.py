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
from outbox.model.lease import Partition
from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message
from outbox.model.position import Capture, Position, Window
from outbox.model.subscription import EVERYTHING, Selection
from outbox.model.topics import Topics
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS, OF_SLOTS, slots_of
from outbox.store.dialects.sql import Sql
from outbox.store.dialects.statements import Row
from outbox.store.log.limits import LIMITS, Limits

_TOPIC, _BODY, _DIRECT = 2, 6, 11
_ID = itemgetter(0)
_FORBIDDEN = {
    "standby": "this server is a standby: its snapshots miss open transactions; connect to the primary",
    "written": "a position cannot be captured in a transaction that has written; use a connection of its own",
}


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

    def __init__(
        self, limits: Limits = LIMITS, selection: Selection = EVERYTHING, partition: Partition | None = None
    ) -> None:
        """`partition`: only the messages whose slots it owns; None: those of all slots."""
        self._limits = limits
        self._selection = selection
        self._topics = Topics.of(selection.topics)
        self._slots = slots_of(partition)
        self._narrow = (
            bool(self._slots) or not self._topics.everything or (selection.tags, selection.only) != (None, None)
        )
        # An empty text skips and hides nothing: no subscription has an empty name, and no message an empty topic. Half
        # messages are hidden unless their topic is named, because only a checker handles them.
        self._skips = selection.skips or ""
        self._hidden = "" if self._topics.halves else HALF_TOPIC

    def now(self, channel: Channel) -> Capture:
        """Capture the position of now, which sees all that was committed before this call."""
        snapshot, incarnation, forbidden, now = channel.rows(channel.database.dialect.capture)[0]
        return _captured(snapshot, incarnation, forbidden, channel.database.moment(now))

    def read_on(self, channel: Channel, base: Position) -> Page:
        """Capture, and read everything that was committed since `base`, in one statement.

        The position is the statement's own snapshot, so the rows that it reads are exactly those that the position
        sees.
        """
        dialect, limit = channel.database.dialect, self._limits.rows + 1
        whole = dialect.read_on if base.open else dialect.read_on_fresh
        statement = self._choosing(channel, dialect.read_on_chosen) if self._narrow else whole
        bounds = {"head": base.head, "open": list(base.open), "limit": limit}
        head, rows = _split(channel.rows(statement, **self._chosen(channel), **bounds))
        capture = _captured(head[2], head[3], head[4], channel.database.moment(head[8]))
        seen = len(rows) if head[0] is None else head[0]
        if seen >= limit:
            return _page(channel, _NOTHING, capture.now, complete=False, seen=seen, capture=capture)
        part = self._fitting(channel, rows)
        return _page(channel, part, capture.now, complete=part.whole, seen=seen, capture=capture)

    def at(self, channel: Channel, ids: Sequence[int]) -> Page:
        """Read the messages with these ids, as many as the limits allow, but at least one."""
        bound = {"inline": self._limits.inline, "only": self._selection.only, "ids": channel.database.bind(ids)}
        rows = channel.rows(_AT, **bound)
        part = self._fitting(channel, rows)
        return _page(channel, part, datetime.now(UTC), complete=part.whole, seen=len(rows))

    def extent(self, channel: Channel, window: Window) -> Extent:
        """Find out where the rows of a window lie; costs one pass over its index entries."""
        first, last, late_first, late_last = channel.rows(channel.database.dialect.extent, **_bounds(window))[0]
        fresh = None if first is None else (first, last)
        return Extent(fresh, None if late_first is None else (late_first, late_last))

    def page(self, channel: Channel, window: Window, extent: Extent, after: int, upto: int) -> Page:
        """Read the rows of a window with ids above `after` and up to `upto`, as many as the limits allow."""
        dialect, limit = channel.database.dialect, self._limits.rows
        late = extent.late is not None and after < extent.late[1]
        first = extent.fresh[0] if extent.fresh else upto + 1
        span = {"after": after, "upto": upto, "first": first, "limit": limit}
        statement = self._choosing(channel, dialect.page_late if late else dialect.page)
        clock, rows = _split(channel.rows(statement, **self._chosen(channel), **_bounds(window), **span))
        part = self._fitting(channel, rows)
        complete = part.whole and len(rows) < limit
        return _page(channel, part, channel.database.moment(clock[8]), complete=complete, seen=len(rows))

    def _choosing(self, channel: Channel, statement: str) -> Sql:
        """Return a statement that applies the selection, with a condition on slots where these are not all."""
        return channel.database.sql(statement, of_slots=f"AND {OF_SLOTS}" if self._slots else "")

    def _chosen(self, channel: Channel) -> dict[str, Any]:
        """Return the selection as parameters of the statements that read messages."""
        tags = self._selection.tags
        return {
            "inline": self._limits.inline,
            **channel.database.dialect.bind_topics(self._topics),
            "tags": None if tags is None else channel.database.bind(tags),
            "skips": self._skips,
            "only": self._selection.only,
            "hidden": self._hidden,
            **self._slots,
        }

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
        found = channel.rows(_BODIES, ids=channel.database.bind(ids), bytes=self._limits.bytes)
        return {id: body for id, body in found}  # noqa: C416 - rows are tuples of any length


def nothing(capture: Capture | None) -> Page:
    """Return a page without rows, for a moment at which no rows were read."""
    now = datetime.now(UTC) if capture is None else capture.now
    return Page(rows=[], reached=None, make=lambda _rows: [], now=now, complete=True, seen=0, capture=capture)


def _page(
    channel: Channel, part: _Part, now: datetime, *, complete: bool, seen: int, capture: Capture | None = None
) -> Page:
    make = channel.database.dialect.messages
    return Page(rows=part.rows, reached=part.reached, make=make, now=now, complete=complete, seen=seen, capture=capture)


def _captured(snapshot: str, incarnation: str, forbidden: str | None, now: datetime) -> Capture:
    if forbidden == "standby":
        raise StandbyError(_FORBIDDEN[forbidden])
    if forbidden is not None:
        raise DatabaseError(_FORBIDDEN[forbidden])
    return Capture(position=Position.parse(snapshot), incarnation=incarnation, now=now)


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
    FROM {{message}} WHERE {{id_in_ids}} AND direct = :only ORDER BY id
"""
#: Large bodies, as many as the limit of bytes allows, but at least one; by primary key. Bodies stay out of the window
#: function, because SQLite copies everything that goes through one.
_BODIES = """
    SELECT id, body FROM {message} WHERE {id_in_ids} AND id IN (
        SELECT id FROM (
            SELECT id, sum(length(body)) OVER (ORDER BY id) AS cut, row_number() OVER (ORDER BY id) AS nth
            FROM {message} WHERE {id_in_ids}) AS c
        WHERE cut <= :bytes OR nth = 1)
    ORDER BY id
"""
