"""The planner: captures positions and divides windows into tasks, on Spark's driver, by a connection to the primary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.errors import DatabaseError, OutboxError, PurgedError, StandbyError
from outbox.model.position import EARLIEST, Position, Window
from outbox.model.retry import seconds_to_wait
from outbox.spark.connections import refused
from outbox.spark.fetch import PAUSE, Task
from outbox.spark.offset import write
from outbox.spark.place import Address, Place
from outbox.store.dialects import part_of
from outbox.store.dialects.speech import Speech
from outbox.store.dialects.statements import Sql
from outbox.store.log import extraction
from outbox.store.log.extraction import EVERYTHING, MESSAGES, Extraction, Narrowing, Span, columns_of, split
from outbox.store.log.log import Log
from outbox.store.log.stamp import Server, Stamp, purged, server_of, stamp, written

if TYPE_CHECKING:
    from outbox.store.database import Channel

T = TypeVar("T")

ROWS_PER_TASK = 500_000


def position(*, url: str, schema: str | None = None) -> str:
    """Capture the position of now, as text for the options `since`, `until` and `startingPosition`.

    Args:
        url: the primary's URL, without a password; or `env:NAME`, an environment variable that holds the URL.
        schema: the schema of the tables, on PostgreSQL.
    """
    with closing(Planner(Place(rows=Address(url), schema=schema))) as planner:
        return write(planner.now())


@dataclass(frozen=True, slots=True)
class Page:
    """The beginning of a window: how many rows it holds, the id of the last of them, and whether the window goes on."""

    rows: int
    last: int | None
    more: bool


class Planner:
    """Plans reads of one outbox. It connects at the first call, and again after the connection was lost.

    A pickled planner has no connection.

    Raises, in every method that connects:
        SchemaError: the tables are not there, or of another version.
        DatabaseError: the database is a copy of another one, refuses the read, or cannot be reached.
        StandbyError: the server is a standby.
    """

    def __init__(self, place: Place, *, retries: int = 5) -> None:
        self.place = place
        self._retries = retries
        self._opened: Channel | None = None

    def now(self) -> Stamp:
        """Capture the position of now, and return it once a crash can no longer undo it."""
        return self._ask(stamp)

    def server(self) -> Server:
        """Return the server and database of the connection."""
        return self._ask(server_of)

    def purged(self) -> Position | None:
        """Return the position of everything that was ever purged; None: nothing was."""
        return self._ask(purged)

    def require_unpurged(self, window: Window) -> None:
        """Raise `PurgedError` if rows of the window were purged."""
        gone = self.purged()
        if gone is not None and window.overlaps(gone):
            raise PurgedError(
                f"messages after the position {window.base} were purged unread from {self.place.primary_label()} (purge"
                f" has come to {gone}): keep messages longer (--older-than of the purge), or set failOnDataLoss=false"
                " to go on with the messages that are left"
            )

    def page(self, window: Window, limit: int, *, narrowing: Narrowing = EVERYTHING, after: int | None = None) -> Page:
        """Return where the first `limit` rows of a window end; with `after`, only rows with higher ids count."""

        def look(channel: Channel) -> Page:
            parts = self._parts(channel, window, Extraction(dialect="", narrowing=narrowing), after, None)
            if not parts:
                return Page(0, None, more=False)
            count, last = channel.rows(Sql(extraction.page(parts, limit)))[0]
            return Page(min(count, limit), last, more=count > limit)

        return self._ask(look)

    def tasks(
        self,
        window: Window,
        *,
        columns: Sequence[str] = (),
        narrowing: Narrowing = EVERYTHING,
        partitions: int | None = None,
        rows_per_task: int = ROWS_PER_TASK,
        after: int | None = None,
        upto: int | None = None,
        whole: Window | None = None,
    ) -> list[Task]:
        """Divide a window's messages into tasks by id. Every message is in exactly one task, also if tasks run again.

        Args:
            window: a window between two positions of this server, as `now` returns them.
            columns: columns of `messages`; empty: all.
            narrowing: only these messages.
            partitions: how many tasks to make, instead of one per `rows_per_task` ids.
            rows_per_task: the most rows that a task has.
            after: only messages with higher ids.
            upto: only messages with this id or a lower one.
            whole: the window of which no row may be purged before a task ends; None: nothing is checked.
        """

        def plan(channel: Channel) -> list[Task]:
            wanted = Extraction(dialect="", columns=tuple(columns) or tuple(columns_of(MESSAGES)), narrowing=narrowing)
            parts = self._parts(channel, window, wanted, after, upto)
            pieces = [piece for part in parts for piece in _divided(part, partitions, rows_per_task)]
            return self._tasks(channel, pieces, whole)

        return self._ask(plan)

    def whole(self, window: Window) -> Window:
        """Return the window of which no row may be purged while `window` is read.

        If `window` begins at earliest, rows that are purged already do not count as lost.
        """
        if window.base != EARLIEST:
            return window
        return Window(self.purged() or EARLIEST, window.target)

    def table_task(self, table: str, *, columns: Sequence[str] = (), narrowing: Narrowing = EVERYTHING) -> Task:
        """Return the task that reads a whole table other than `messages`, in the state when the task runs."""

        def plan(channel: Channel) -> Task:
            wanted = Extraction(
                dialect=channel.database.dialect.name,
                schema=self.place.schema,
                table=table,
                columns=tuple(columns) or tuple(columns_of(table)),
                narrowing=narrowing,
            )
            return self._tasks(channel, [wanted])[0]

        return self._ask(plan)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        channel, self._opened = self._opened, None
        if channel is not None:
            channel.close()
            channel.database.engine.dispose()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _parts(
        self, channel: Channel, window: Window, wanted: Extraction, after: int | None, upto: int | None
    ) -> list[Extraction]:
        """Return the late and the fresh part of a window, without a part that has no ids after `after` up to `upto`."""
        wanted = replace(wanted, dialect=channel.database.dialect.name, schema=self.place.schema)
        found = []
        for span in _spans(channel, window):
            first = span.first if after is None else max(span.first, after + 1)
            last = span.last if upto is None else min(span.last, upto)
            if first <= last:
                found.append(replace(wanted, span=replace(span, first=first, last=last)))
        return found

    def _tasks(self, channel: Channel, pieces: Sequence[Extraction], whole: Window | None = None) -> list[Task]:
        """Return a task for each piece. If a standby is read, it must replay the log up to the end of now."""
        lsn = written(channel)[1] if self.place.planner is not None else None
        server = server_of(channel)
        return [
            Task(place=self.place, server=server, extraction=each, retries=self._retries, whole=whole, replayed=lsn)
            for each in pieces
        ]

    def _ask(self, question: Callable[[Channel], T]) -> T:
        failures = 0
        while True:
            try:
                return question(self._connected())
            except StandbyError as error:
                self.close()
                raise StandbyError(
                    f"{error}; to read rows from the standby, set plannerUrl to the primary; for an extract name the"
                    " primary as the database, and the standby by standby (--standby)"
                ) from error
            except Exception as error:
                self.close()
                failures += 1
                lasting = self._lasting(error, failures)
                if lasting is not None:
                    raise lasting from error
            time.sleep(seconds_to_wait(PAUSE, failures))

    def _lasting(self, error: Exception, failures: int) -> Exception | None:
        """Return the error to give up with, or None if another try may succeed."""
        if isinstance(error, OutboxError):
            return error
        cause = getattr(error, "orig", None) or error
        fatal = refused(cause)
        if fatal is not None or not self.place.primary().transient(error):
            return fatal or error
        if failures <= self._retries:
            return None
        reason = str(cause).strip().partition("\n")[0]
        return DatabaseError(
            f"{self.place.primary_label()} cannot be reached after {self._retries} more tries: {reason}"
        )

    def _connected(self) -> Channel:
        if self._opened is None:
            self._opened = self.place.primary().open()
            self._verify(self._opened)
        return self._opened

    def _verify(self, channel: Channel) -> None:
        from outbox.store import identity

        with channel.database.explained():
            stored = identity.stored_identity(channel)
            channel.database.slots = stored.slots if stored else channel.database.slots
            identity.verify(channel)
        patience = part_of(channel.database.dialect.name, Speech).patience
        if patience is not None:
            channel.run(patience)


def _divided(part: Extraction, partitions: int | None, rows: int) -> list[Extraction]:
    assert part.span is not None
    width = part.span.last - part.span.first + 1
    return [replace(part, span=span) for span in split(part.span, partitions or -(-width // rows))]


def _spans(channel: Channel, window: Window) -> list[Span]:
    """Return the ids between which the late and the fresh rows of a window lie."""
    extent = Log().extent(channel, window)
    late = [] if extent.late is None else [Span(window, *extent.late, late=True)]
    return late + ([] if extent.fresh is None else [Span(window, *extent.fresh)])
