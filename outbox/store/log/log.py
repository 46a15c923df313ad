"""The log: append-only, read by position. Callers of this module do not depend on the kind of database."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from operator import itemgetter
from typing import Any, Self

from outbox.errors import DatabaseError, LeaseLostError, StandbyError
from outbox.model.lease import Partition
from outbox.model.limits import HALF_TOPIC, require_numbers
from outbox.model.message import Message
from outbox.model.position import EARLIEST, Capture, Position, Window
from outbox.model.subscription import EVERYTHING, Selection
from outbox.model.topics import Topics
from outbox.runtime.named import named
from outbox.store.database import Channel
from outbox.store.dialects.dialect import OF_SLOTS, Values, slots_of
from outbox.store.dialects.statements import Row
from outbox.store.log.filtering import Condition, condition_of

logger = logging.getLogger("outbox")

_TOPIC, _BODY = 2, 6
_ID = itemgetter(0)
_FORBIDDEN = {
    "standby": "this server is a standby: its snapshots miss open transactions; connect to the primary",
    "written": "a position cannot be captured in a transaction that has written; use a connection of its own",
}
_ANOTHER = (
    "the server was restarted, or a connection has met another server: positions in memory are void. If the address"
    " leads to several servers, let it lead to the primary only"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a read returns: rows, and bytes of bodies (twice as many while large bodies are fetched).

    Raises:
        ValueError: one of the numbers is no whole number from 1 on.
    """

    rows: int = 1000
    bytes: int = 8 * 1024 * 1024

    def __post_init__(self) -> None:
        # With 0 rows a worker would find every log empty.
        require_numbers(rows=self.rows, bytes=self.bytes)

    @property
    def inline(self) -> int:
        """The size up to which a body comes with the row: `rows` + 1 such bodies cannot exceed `bytes`."""
        return self.bytes // (self.rows + 1)


LIMITS = Limits()


@dataclass(frozen=True, kw_only=True)
class Page:
    """The result of a read: rows in the order of the log. `messages` are made at the first access.

    `complete`: there was nothing else to read; if not, everything up to the id `reached` is here. (`reached` is None if
    the rows were too many for one read, and the window has to be read page by page.) `seen` also counts the rows that
    the selection left out, and no row of a whole read has an id above `highest`.
    """

    rows: list[Row]
    reached: int | None
    make: Callable[[Sequence[Row]], list[Message]]
    now: datetime
    complete: bool
    seen: int
    capture: Capture | None = None
    highest: int = 0
    #: The moment of the read, by the monotonic clock of this machine.
    read_at: float = field(default_factory=time.monotonic)

    @cached_property
    def messages(self) -> list[Message]:
        """The messages that the subscription selects."""
        return self.make(self.rows)


@dataclass(frozen=True, slots=True)
class Extent:
    """The first and the last id of a window's fresh part, and of the late part; None: no rows.

    The last id of the fresh part may be that of the log, which may lie behind the end of the window.
    """

    fresh: tuple[int, int] | None
    late: tuple[int, int] | None

    @classmethod
    def behind(cls, after: int, last: int) -> Extent:
        """Return an extent of a window without late rows, of which the rows up to the id `after` were read.

        `last`: the last id of the log.
        """
        return cls((after + 1, last) if last > after else None, None)

    @property
    def last(self) -> int:
        """The last id of the extent; 0 without rows."""
        return max(part[1] for part in (self.fresh, self.late, (0, 0)) if part)

    @property
    def first(self) -> int:
        """The first id of the extent; 0 without rows."""
        return min((part[0] for part in (self.fresh, self.late) if part), default=0)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows with their bodies; every row up to the id `reached` is here, and if `whole`, every row of the read."""

    rows: list[Row]
    reached: int | None
    whole: bool


_NOTHING = _Part([], None, whole=True)


class Log:
    """Reads the log, on channels that nobody else uses meanwhile."""

    def __init__(
        self, limits: Limits = LIMITS, selection: Selection = EVERYTHING, partition: Partition | None = None
    ) -> None:
        """`partition`: only the messages of these slots; None: of all slots."""
        self._limits = limits
        self._selection = selection
        topics = Topics.of(selection.topics)
        self._slots = slots_of(partition)
        chosen = (selection.tags, selection.filter)
        self._narrow = bool(self._slots) or not topics.everything or chosen != (None, None)
        # An empty text hides nothing, because no message has an empty topic. Half messages are hidden unless their
        # topic is named, because only a checker handles them.
        self._hidden = "" if topics.halves else HALF_TOPIC
        self._incarnation: str | None = None

    def bound_to(self, incarnation: str) -> Self:
        """Return the log of one incarnation of the server: a read that another server answers raises.

        Each connection asks anew where the address leads, and a pooler may ask at each statement. Another server lacks
        rows that a position sees, or has others.
        """
        bound = copy.copy(self)
        bound._incarnation = incarnation
        return bound

    def now(self, channel: Channel) -> Capture:
        """Capture the position of now, which sees all commits before this call."""
        snapshot, incarnation, forbidden, now = channel.rows(channel.database.dialect.reads.capture)[0]
        return self._captured(snapshot, incarnation, forbidden, channel.database.moment(now))

    def read_on(self, channel: Channel, base: Position) -> Page:
        """Capture, and read everything that was committed since `base`, in one statement.

        The position is the snapshot of the statement, and so sees exactly the rows that were read.
        """
        reads, limit = channel.database.dialect.reads, self._limits.rows + 1
        whole = reads.read_on if base.open else reads.read_on_fresh
        bounds = {"head": base.head, "open": list(base.open), "limit": limit}
        head, rows = _split(self._chosen(channel, reads.read_on_chosen if self._narrow else whole, bounds))
        capture = self._captured(head[2], head[3], head[4], channel.database.moment(head[8]))
        seen = len(rows) if head[0] is None else head[0]
        if seen >= limit:
            return _page(channel, _NOTHING, capture.now, complete=False, seen=seen, capture=capture)
        part = self._fitting(channel, rows)
        highest = int(head[7]) if head[7] is not None else rows[-1][0] if rows else 0
        page = _page(channel, part, capture.now, complete=part.whole, seen=seen, capture=capture)
        return replace(page, highest=highest)

    def extent(self, channel: Channel, window: Window) -> Extent:
        """Find out where the rows of a window lie, by one pass over index entries.

        A window from the beginning of the log on takes two probes; its last id may lie behind the end of the window.
        """
        if window.base == EARLIEST:
            first, last, *who = channel.rows(_ENDS)[0]
            self._require(*who)
            return Extent(None if first is None else (first, last), None)
        extent = channel.rows(channel.database.dialect.reads.extent, **_bounds(window))[0]
        first, last, late_first, late_last, *who = extent
        self._require(*who)
        fresh = None if first is None else (first, last)
        return Extent(fresh, None if late_first is None else (late_first, late_last))

    def last(self, channel: Channel) -> int:
        """Return the last id of the log, by one probe of the primary key; 0 without rows."""
        last, *who = channel.rows(_LAST)[0]
        self._require(*who)
        return int(last or 0)

    def page(self, channel: Channel, window: Window, extent: Extent, after: int, upto: int) -> Page:
        """Read the rows of a window with ids above `after` and up to `upto`, as many as the limits allow."""
        reads, limit = channel.database.dialect.reads, self._limits.rows
        late = extent.late is not None and after < extent.late[1]
        first = extent.fresh[0] if extent.fresh else upto + 1
        bounds = {**_bounds(window), "after": after, "upto": upto, "first": first, "limit": limit}
        clock, rows = _split(self._chosen(channel, reads.page_late if late else reads.page, bounds))
        self._require(clock[3], clock[4])
        part = self._fitting(channel, rows)
        complete = part.whole and len(rows) < limit
        return _page(channel, part, channel.database.moment(clock[8]), complete=complete, seen=len(rows))

    def _chosen(self, channel: Channel, statement: str, bounds: dict[str, Any]) -> list[Row]:
        """Read the rows of a statement that the selection chooses."""
        chosen = selected(channel.database.dialect.values, self._selection, self._slots)
        left_out = {"inline": self._limits.inline, "hidden": self._hidden}
        sql = channel.database.sql(statement, chosen=chosen.sql)
        return channel.rows(sql, **{**chosen.parameters, **left_out, **bounds})

    def _fitting(self, channel: Channel, rows: list[Row]) -> _Part:
        """Sort the rows, and fetch the bodies that were too large to come along: as many as fit, but at least one."""
        rows.sort(key=_ID)
        bare = [row for row in rows if row[_BODY] is None]
        if not bare:
            return _Part(rows, rows[-1][0] if rows else None, whole=True)
        left_out = {row[0] for row in bare if row[_TOPIC] == self._hidden}
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
        self._require(*next(who for id, _, *who in found if id is None))
        return {id: body for id, body, *_ in found if id is not None}

    def _captured(self, snapshot: str, incarnation: str, forbidden: str | None, now: datetime) -> Capture:
        self._require(incarnation, forbidden)
        return Capture(position=Position.parse(snapshot), incarnation=incarnation, now=now)

    def _require(self, incarnation: str, forbidden: str | None) -> None:
        """Raise unless the server that has answered may answer, and is the one that the log is bound to."""
        if forbidden == "standby":
            raise StandbyError(_FORBIDDEN[forbidden])
        if forbidden is not None:
            raise DatabaseError(_FORBIDDEN[forbidden])
        if self._incarnation not in (None, incarnation):
            raise LeaseLostError(_ANOTHER)


def selected(values: Values, selection: Selection, slots: Mapping[str, int] | None = None) -> Condition:
    """Return the condition of a selection, of nothing but what the selection asks for: each part costs time per row.

    `slots`: as of `slots_of`; None: all slots.
    """
    topics, parts = Topics.of(selection.topics), list[str]()
    parameters: dict[str, Any] = {"hidden": HALF_TOPIC}
    if topics.patterns and not topics.halves:
        parts.append("topic <> :hidden")
    if not topics.everything:
        parts.append(f"({values.of_topics})")
        parameters.update(values.bind_topics(topics))
    if selection.tags is not None:
        parts.append(values.among_texts.format(value="tags", list=":tags"))
        parameters["tags"] = values.bind_list(selection.tags)
    if slots:
        parts.append(OF_SLOTS)
        parameters.update(slots)
    if selection.filter is not None:
        filtered = condition_of(selection.filter, values.filtering)
        parts.append(filtered.sql)
        parameters.update(filtered.parameters)
    return Condition(" AND ".join(parts) or "TRUE", parameters)


def last_id(channel: Channel) -> int:
    """Return the last id of the log for people, whoever answers; 0 without rows."""
    return int(channel.rows(_LAST)[0][0] or 0)


def ids_before(channel: Channel, moment: datetime) -> tuple[int, int]:
    """Return the first id of the log, and the last id before a row that was created at `moment` or later.

    This is a search by halves: of rows that were written at once, some before the last id may be later; see
    `last_id_before`. Of an empty log this is (1, 0). The second is smaller than the first where no row is older than
    `moment`.
    """
    lowest, highest, *_ = channel.rows(_ENDS)[0]
    if lowest is None:
        return 1, 0
    low, high = lowest, highest + 1
    while low < high:
        middle = (low + high) // 2
        # No row from here on means that they were purged during the search.
        found = channel.rows(_FROM, id=middle)
        created_at = channel.database.dialect.clock.read(found[0][1]) if found else None
        if created_at is not None and created_at < moment:
            low = found[0][0] + 1
        else:
            high = middle
    return lowest, low - 1


def last_id_before(channel: Channel, moment: datetime) -> int:
    """Return the last id before each row that was created at `moment` or later.

    A row has the moment at which its statement began. So between the rows of a long statement lie others with later
    moments, and a search by halves may pass these over. The same goes for rows that were written while the clock was
    ahead: they are looked for near the place and at many places of the log before, and logged.
    """
    first, last = ids_before(channel, moment)
    if last < first:
        return last
    _, sure = ids_before(channel, moment - _LONGEST_STATEMENT)
    last = (_first_since(channel, moment, sure, last) or last + 1) - 1
    by_halves = last
    while (later := _some_since(channel, moment, first, last)) is not None:
        last = later - 1
    if last < by_halves:
        logger.warning(
            "the clock of the database has stepped: of the messages with the ids %d to %d some were written at %s or"
            " later, and some before; all of them are read",
            last + 1,
            by_halves,
            moment.isoformat(" ", "seconds"),
            extra=named("clock_stepped"),
        )
    return last


def _some_since(channel: Channel, moment: datetime, first: int, last: int) -> int | None:
    """Return the id of a row up to `last` that was created at `moment` or later: of the nearby rows or a sample."""
    near = _first_since(channel, moment, last - _NEARBY, last)
    for place in range(first, last - _NEARBY, max(1, (last - first) // _PLACES)):
        # Read row by row, because each is one probe of the primary key.
        for id, created_at in channel.rows(_FROM, id=place):
            if id <= last and channel.database.moment(created_at) >= moment:
                return min(int(id), near or last)
    return near


def _first_since(channel: Channel, moment: datetime, after: int, last: int) -> int | None:
    """Return the id of the first row behind `after`, up to `last`, that was created at `moment` or later."""
    bounds = {"after": after, "last": last, "moment": channel.database.dialect.clock.bind(moment)}
    found = channel.rows(_CREATED_SINCE, **bounds)
    return int(found[0][0]) if found else None


def nothing(capture: Capture | None) -> Page:
    """Return a page without rows, for a moment at which no rows were read."""
    now = datetime.now(UTC) if capture is None else capture.now
    return Page(rows=[], reached=None, make=lambda _rows: [], now=now, complete=True, seen=0, capture=capture)


def _page(
    channel: Channel, part: _Part, now: datetime, *, complete: bool, seen: int, capture: Capture | None = None
) -> Page:
    make = channel.database.dialect.reads.messages
    return Page(rows=part.rows, reached=part.reached, make=make, now=now, complete=complete, seen=seen, capture=capture)


def _split(rows: list[Row]) -> tuple[Row, list[Row]]:
    """Separate the row of the capture or the clock (without message_id) from the messages."""
    at = 0 if rows[0][1] is None else next(i for i, row in enumerate(rows) if row[1] is None)
    return rows[at], rows[:at] + rows[at + 1 :]


def _bounds(window: Window) -> dict[str, Any]:
    head, target = window.fresh
    return {"head": head, "target": target, "open": list(window.fresh_open), "late": list(window.late)}


_LAST = "SELECT (SELECT max(id) FROM {message}), {who_answers}"
_ENDS = "SELECT (SELECT min(id) FROM {message}), (SELECT max(id) FROM {message}), {who_answers}"
#: A statement is taken to write its rows within this time; beside a longer one, later moments may be passed over.
_LONGEST_STATEMENT = timedelta(minutes=1)
#: Rows before a moment's place that are all looked at, and places of the log that are looked at. A clock that was ahead
#: for fewer rows than lie between two places, farther away, is not seen.
_NEARBY, _PLACES = 10_000, 500
#: By primary key, because no index has the moments.
_CREATED_SINCE = """
    SELECT id FROM {message} WHERE id > :after AND id <= :last AND created_at >= :moment ORDER BY id LIMIT 1
"""
_FROM = "SELECT id, created_at FROM {message} WHERE id >= :id ORDER BY id LIMIT 1"
#: Large bodies, as many as the limit of bytes allows, but at least one; by primary key. Bodies stay out of the window
#: function, because SQLite copies everything that goes through one. One row without an id tells who answers.
_BODIES = """
    SELECT NULL AS id, NULL AS body, {who_answers}
    UNION ALL SELECT id, body, NULL, NULL FROM {message} WHERE {id_in_ids} AND id IN (
        SELECT id FROM (
            SELECT id, sum(length(body)) OVER (ORDER BY id) AS cut, row_number() OVER (ORDER BY id) AS nth
            FROM {message} WHERE {id_in_ids}) AS c
        WHERE cut <= :bytes OR nth = 1)
"""
