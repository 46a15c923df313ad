"""Following the log: finds the end of a stream's next batch, and plans the tasks of the batch. Needs no Spark."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from outbox.errors import PositionError, PurgedError
from outbox.model.position import EARLIEST, Position, Progress, Window
from outbox.spark.fetch import Task
from outbox.spark.offset import Mark, Offset
from outbox.spark.options import Options
from outbox.spark.planner import Page, Planner
from outbox.store.log.extraction import Narrowing
from outbox.store.log.stamp import Server, Stamp

_log = logging.getLogger(__name__)

#: The offset moves this often while only messages come that the stream does not select. Otherwise the purge of those
#: messages would look like a loss. Each such move is an empty batch in Spark.
_MOVE_SECONDS = 600.0
_ANYTHING = Narrowing(halves=True)


class Follower:
    """Finds the next batch of one stream, and plans a repeated batch again."""

    def __init__(self, options: Options, planner: Planner, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._planner = planner
        self._clock = clock
        self._initial: Offset | None = None
        self._end: Stamp | None = None
        #: The offset after which no row had come, and the stamp up to which no row had come. The times are those of the
        #: last look and of the first look that found no row.
        self._idle: tuple[Offset, Stamp] | None = None
        self._looked_at = self._idle_since = 0.0
        self._selected = options.narrowing.describe()

    def initial(self) -> Offset:
        """Return the offset at which the stream begins; every call returns the same offset."""
        if self._initial is None:
            self._initial = self._first()
        return self._initial

    def stop_at_now(self) -> None:
        """Capture the position of now as the end of the stream."""
        self._end = self._planner.now()

    def now(self) -> Offset:
        """Return the offset at which all rows that are committed now have been delivered."""
        return self._at(self._end or self._planner.now())

    def close(self) -> None:
        """Close the connection."""
        self._planner.close()

    def latest(self, start: Offset, limit: int | None) -> Offset:
        """Return where the batch after `start` ends: at most `limit` rows later, or at `start` if no row has come.

        Raises:
            PositionError: the offset is of another server or lies ahead of the server, or its stream selected other
                messages.
            PurgedError: no row has come after `start`, and rows after `start` were purged unread.
        """
        if (
            self._idle is not None
            and self._idle[0] == start
            and self._clock() < self._looked_at + self._options.poll_seconds
        ):
            return start
        if start.latest:
            return self.now()
        stamp = self._end or self._planner.now()
        known = self._on(start, stamp.server, stamp.position)
        within = self._within(known, limit)
        if within is not None:
            return within
        return self._beyond(start, known, stamp, limit)

    def tasks(self, start: Offset, end: Offset, columns: tuple[str, ...]) -> list[Task]:
        """Plan the batch between two offsets, always with the same rows; raise if these are gone."""
        if start.latest:
            return []
        server = self._planner.server()
        if server != end.server and self._options.on_identity_change == "fail":
            raise self._changed(end.server, server)
        self._require_same_selection(end)
        known = self._on(start, end.server, end.progress.target or end.progress.base)
        return [
            task
            for window, after, upto in _parts_of(known.progress, end.progress)
            for task in self._planner.tasks(
                window,
                columns=columns,
                narrowing=self._options.narrowing,
                partitions=self._options.partitions,
                rows_per_task=self._options.rows_per_partition,
                after=after,
                upto=upto,
                whole=self._unpurged(window, end.gone or known.gone),
            )
        ]

    def _first(self) -> Offset:
        start = self._options.start
        if start == "latest":
            return replace(self._at(Stamp(position=EARLIEST, server=self._planner.server())), latest=True)
        if isinstance(start, Mark):
            return self._at(Stamp(position=start.position, server=start.server or self._planner.server()))
        return self._earliest(self._planner.server())

    def _at(self, stamp: Stamp) -> Offset:
        return Offset(server=stamp.server, progress=Progress(stamp.position), selected=self._selected)

    def _earliest(self, server: Server) -> Offset:
        """Return the offset at the beginning of the log. Rows that are purged already do not count as lost."""
        gone = self._planner.purged() or EARLIEST
        return replace(self._at(Stamp(position=EARLIEST, server=server)), gone=gone)

    def _within(self, known: Offset, limit: int | None) -> Offset | None:
        """Return where the next page of the open window ends; None: no window is open, or none of its rows is left."""
        progress = known.progress
        if progress.target is None:
            return None
        window = Window(progress.base, progress.target)
        page = self._page(window, limit, after=progress.after)
        if not page.rows:
            return None
        return _end_of(known, window, page)

    def _beyond(self, start: Offset, known: Offset, stamp: Stamp, limit: int | None) -> Offset:
        """Return where the first page of the rows committed after the last window ends.

        If no row came, return `start`, or the offset of `stamp` if the checkpoint has to move.
        """
        base = known.progress.target or known.progress.base
        passed = self._passed(start, stamp)
        window = Window(base, stamp.position)
        unseen = Window(passed or base, stamp.position)
        page = self._page(unseen, limit) if unseen.base != unseen.target else Page(0, None, more=False)
        if page.rows:
            self._idle = None
            return _end_of(replace(known, progress=Progress(base)), window, page)
        if self._options.fail_on_data_loss:
            # Of an open window rows were left, so that here all of the window counts. Where an earlier look found no
            # row, none was lost.
            self._unpurged(Window(passed or known.progress.base, stamp.position), known.gone)
        if start.selected != self._selected:
            # Move although no row came, so that the checkpoint stores the present selection.
            return self._at(stamp)
        return self._rest(start, window, stamp)

    def _rest(self, start: Offset, window: Window, stamp: Stamp) -> Offset:
        now = self._clock()
        if self._passed(start, stamp) is None:
            self._idle_since = now
        self._idle, self._looked_at = (start, stamp), now
        # A run with an end moves at once, because the end may come before _MOVE_SECONDS have passed.
        if now - self._idle_since < _MOVE_SECONDS and self._end is None:
            return start
        self._idle_since = now
        if not self._planner.page(window, 1, narrowing=_ANYTHING).rows:
            return start
        return self._at(stamp)

    def _passed(self, start: Offset, stamp: Stamp) -> Position | None:
        """Return the position up to which an earlier look found no row after `start`; None: there was no such look.

        A look at another server than the present does not count.
        """
        if self._idle is None or self._idle[0] != start or self._idle[1].server != stamp.server:
            return None
        passed = self._idle[1].position
        return passed if passed.head <= stamp.position.head else None

    def _page(self, window: Window, limit: int | None, after: int | None = None) -> Page:
        page = self._planner.page(window, limit or 1, narrowing=self._options.narrowing, after=after)
        # Without a limit the first row is enough to know.
        return page if limit is not None else replace(page, more=False)

    def _on(self, offset: Offset, server: Server, head: Position) -> Offset:
        """Return the offset as counted on a server that has come to `head`, or the beginning to replay from."""
        changed = offset.server != server
        if changed and (self._options.on_identity_change == "fail" or offset.server.dialect != server.dialect):
            raise self._changed(offset.server, server)
        if self._options.on_identity_change == "replay" and (changed or _lies_ahead(offset, head)):
            _log.warning("the log of %s is read again from its beginning", self._planner.place.primary_label())
            return self._earliest(server)
        if _lies_ahead(offset, head):
            raise PositionError(
                f"the server {self._planner.place.primary_label()} has come to {head}, below the position"
                f" {offset.progress.base} of the checkpoint: the server was restored from an older copy, and draws"
                " numbers again that were read. Set onIdentityChange=replay to read the whole log again, or begin with"
                " a new checkpointLocation"
            )
        self._require_same_selection(offset)
        return replace(offset, server=server, selected=self._selected)

    def _require_same_selection(self, offset: Offset) -> None:
        """Refuse an offset of a stream that selected other messages.

        Older messages that only the present stream selects would never come.
        """
        if self._options.on_selection_change == "accept" or offset.selected == self._selected:
            return
        raise PositionError(
            f"the selection of the checkpoint is {_in_words(offset.selected)}, and now {_in_words(self._selected)}:"
            " older messages of the new selection alone would never come. (1) Keep the selection, or (2) begin with a"
            " new checkpointLocation, to read them, too, or (3) set onSelectionChange=accept, to go on from the"
            " checkpoint with the new selection"
        )

    def _changed(self, before: Server, now: Server) -> PositionError:
        return PositionError(
            f"the checkpoint is of another server than {self._planner.place.primary_label()} ({now.unlike(before)}). A"
            " promoted standby and a restored copy draw the same numbers again for other rows. Set"
            " onIdentityChange=replay to read the whole log again, or =accept if the numbers go on, as after pg_upgrade"
        )

    def _unpurged(self, window: Window, gone: Position | None) -> Window | None:
        """Return the window of which no row may be missing, or raise; None: `failOnDataLoss` is false."""
        whole = window if window.base != EARLIEST else Window(gone or EARLIEST, window.target)
        try:
            self._planner.require_unpurged(whole)
        except PurgedError as error:
            if self._options.fail_on_data_loss:
                raise
            _log.warning("going on although %s", error)
        return whole if self._options.fail_on_data_loss else None


def _lies_ahead(offset: Offset, head: Position) -> bool:
    newest = offset.progress.target or offset.progress.base
    return newest.head > head.head


def _in_words(selected: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in selected.items()) or "all topics"


def _end_of(known: Offset, window: Window, page: Page) -> Offset:
    # The end keeps the purged position of the first planning: Spark may ask for the beginning again, much later, when
    # more is gone.
    gone = known.gone if window.base == EARLIEST else None
    progress = Progress(window.base, window.target, page.last) if page.more else Progress(window.target)
    return replace(known, progress=progress, gone=gone)


def _parts_of(start: Progress, end: Progress) -> list[tuple[Window, int | None, int | None]]:
    """Return the windows of a batch, each with the id after which the batch begins and the id up to which it goes."""
    target = end.target or end.base
    if start.target is None:
        return [(Window(start.base, target), None, end.after)]
    if target == start.target:
        return [(Window(start.base, target), start.after, end.after)]
    # Before 4.2 Spark does not pass the start of a batch. So the first batch of a restarted stream takes all rows: the
    # rest of the open window, and all later rows.
    rest = (Window(start.base, start.target), start.after, None)
    return [rest, (Window(start.target, target), None, end.after)]
