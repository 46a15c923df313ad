"""The planner: captures positions and divides windows into tasks, on Spark's driver, by a connection to the primary."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.errors import DatabaseError, MissingExtraError, OptionError, OutboxError, PurgedError, StandbyError
from outbox.model.position import EARLIEST, Position, Window
from outbox.model.retry import seconds_to_wait
from outbox.spark.connections import refused
from outbox.spark.fetch import PAUSE
from outbox.spark.place import Place, engine_options, require_file
from outbox.spark.task import USUAL, Manner, Task
from outbox.store.dialects.extraction import speech_of
from outbox.store.dialects.kinds import is_file
from outbox.store.log import extraction
from outbox.store.log.extraction import EVERYTHING, MESSAGES, Extraction, Narrowing, Span, columns_of, split
from outbox.store.log.log import Log
from outbox.store.log.stamp import Server, Stamp, purged, server_of, stamp, written

if TYPE_CHECKING:
    from outbox.store.database import Channel, Database

T = TypeVar("T")

ROWS_PER_TASK = 500_000


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
        """Return which server and database this is."""
        return self._ask(server_of)

    def purged(self) -> Position | None:
        """Return the position of what purge has ever deleted; None when nothing is gone."""
        return self._ask(purged)

    def require_unpurged(self, window: Window) -> None:
        """Refuse a window of which rows were purged.

        Raises:
            PurgedError: some of its rows are gone.
        """
        gone = self.purged()
        if gone is not None and window.overlaps(gone):
            raise PurgedError(
                f"messages after the position {window.base} were purged from {self.place.primary_label()} before they"
                f" were read (purge has come to {gone}): keep messages longer (outbox purge --older-than), or set"
                " failOnDataLoss=false to go on with what is left"
            )

    def page(self, window: Window, limit: int, *, narrowing: Narrowing = EVERYTHING, after: int | None = None) -> Page:
        """Return where the first `limit` rows of a window end; with `after`, only rows with higher ids count."""

        def look(channel: Channel) -> Page:
            parts = self._parts(channel, window, Extraction(dialect="", narrowing=narrowing), after, None)
            if not parts:
                return Page(0, None, more=False)
            count, last = channel.rows(extraction.page(parts, limit))[0]
            return Page(min(count, limit), last, more=count > limit)

        return self._ask(look)

    def tasks(
        self,
        window: Window,
        *,
        columns: Sequence[str] = (),
        narrowing: Narrowing = EVERYTHING,
        manner: Manner = USUAL,
        partitions: int | None = None,
        rows_per_task: int = ROWS_PER_TASK,
        after: int | None = None,
        upto: int | None = None,
        whole: Window | None = None,
    ) -> list[Task]:
        """Divide a window's messages into tasks by id. Every message is in exactly one task, also if tasks run again.

        Args:
            window: a window between two positions of this server, as `now` returns them.
            columns: columns of `messages`; empty: all of them.
            narrowing: which of the messages are read.
            manner: how tasks fetch.
            partitions: how many tasks to make, instead of one per `rows_per_task` ids.
            rows_per_task: the most rows that a task has.
            after: only messages with higher ids.
            upto: only messages with ids up to this one.
            whole: the window of which no row may be purged before a task ends; None: nothing is checked.
        """

        def plan(channel: Channel) -> list[Task]:
            wanted = Extraction(dialect="", columns=tuple(columns) or tuple(columns_of(MESSAGES)), narrowing=narrowing)
            parts = self._parts(channel, window, wanted, after, upto)
            pieces = [piece for part in parts for piece in _divided(part, partitions, rows_per_task)]
            server, lsn = self._common(channel)
            return [
                Task(place=self.place, server=server, extraction=each, manner=manner, whole=whole, replayed=lsn)
                for each in pieces
            ]

        return self._ask(plan)

    def whole(self, window: Window) -> Window:
        """Return the window of which no row may be purged while `window` is read.

        If `window` begins at earliest, rows that are purged already do not count as lost.
        """
        if window.base != EARLIEST:
            return window
        return Window(self.purged() or EARLIEST, window.target)

    def table_task(
        self, table: str, *, columns: Sequence[str] = (), narrowing: Narrowing = EVERYTHING, manner: Manner = USUAL
    ) -> Task:
        """Return the one task that reads a whole table other than `messages`, as it is when the task runs."""

        def plan(channel: Channel) -> Task:
            wanted = Extraction(
                dialect=channel.database.dialect.name,
                schema=self.place.schema,
                table=table,
                columns=tuple(columns) or tuple(columns_of(table)),
                narrowing=narrowing,
            )
            server, lsn = self._common(channel)
            return Task(place=self.place, server=server, extraction=wanted, manner=manner, replayed=lsn)

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

    def _common(self, channel: Channel) -> tuple[Server, str | None]:
        """Return what all tasks of a plan share: the server, and the place up to which a standby must replay its log.

        The place is None if no standby is read.
        """
        lsn = written(channel)[1] if self.place.planner is not None else None
        return server_of(channel), lsn

    def _ask(self, question: Callable[[Channel], T]) -> T:
        failures = 0
        while True:
            try:
                return question(self._connected())
            except StandbyError as error:
                self.close()
                raise StandbyError(
                    f"{error}; rows can be read from the standby all the same: set plannerUrl, plannerUrlEnv or"
                    " plannerService to the primary; for an extract name the primary as the database, and the standby"
                    " by standby_url (--standby)"
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
        if fatal is not None or not self._database().transient(error):
            return fatal or error
        if failures <= self._retries:
            return None
        reason = str(cause).strip().partition("\n")[0]
        return DatabaseError(
            f"{self.place.primary_label()} cannot be reached after {self._retries} more tries: {reason}"
        )

    def _connected(self) -> Channel:
        """Return the connection; if there is none, open it and verify the database."""
        if self._opened is None:
            self._opened = self._database().open()
            self._verify(self._opened)
        return self._opened

    def _verify(self, channel: Channel) -> None:
        from outbox.store import identity

        with channel.database.explained():
            stored = identity.stored_identity(channel)
            channel.database.slots = stored.slots if stored else channel.database.slots
            identity.verify(channel)
        patience = speech_of(channel.database.dialect.name).patience
        if patience is not None:
            channel.run(patience)

    def _database(self) -> Database:
        url = self.place.primary.resolve()
        if is_file(url):
            if self.place.schema is not None:
                raise OptionError("schema: SQLite has no schemas; leave it out")
            require_file(url)
        try:
            from outbox.store.database import Database
            from outbox.writing.engines import create_engine
        except ImportError as error:
            raise MissingExtraError(
                "the planner needs psycopg and libpq where Spark's driver runs: pip install 'outbox-log[binary]'"
            ) from error
        engine = create_engine(url.render_as_string(hide_password=False), **engine_options(url))
        return Database(engine, self.place.schema)


def _divided(part: Extraction, partitions: int | None, rows: int) -> list[Extraction]:
    assert part.span is not None
    width = part.span.last - part.span.first + 1
    return [replace(part, span=span) for span in split(part.span, partitions or -(-width // rows))]


def _spans(channel: Channel, window: Window) -> list[Span]:
    """Return the ids between which the late and the fresh rows of a window lie."""
    if window.base == EARLIEST:
        # Read only the two ends of the log, not every row between them.
        first, last = channel.rows(extraction.ends(channel.database.schema))[0]
        return [] if first is None else [Span(window, first, last)]
    extent = Log().extent(channel, window)
    late = [] if extent.late is None else [Span(window, *extent.late, late=True)]
    return late + ([] if extent.fresh is None else [Span(window, *extent.fresh)])
