"""A cursor reads the log from the progress of a partition on, ahead of what is settled by the batches in flight."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from outbox.errors import PositionError
from outbox.model.message import Message
from outbox.model.position import Capture, Position, Progress, Window
from outbox.store.database import Channel
from outbox.store.log.grace import Grace
from outbox.store.log.log import Extent, Log, Page, nothing

_SMALLEST_SPAN = 1_000
_WIDEST_SPAN = 64_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Messages in the order of the log, and the progress of a partition that has settled them all.

    `seen` counts the rows that were read, with the rows that the selection left out; 0: the log held nothing new. No
    row of the window has an id above `highest`.
    """

    page: Page
    window: Window
    end: Progress
    seen: int
    highest: int = 0

    @property
    def messages(self) -> list[Message]:
        """The messages that the subscription selects, made at the first access."""
        return self.page.messages

    @property
    def now(self) -> datetime:
        """The database's clock at the read, plus the time since then, because batches may wait for a long time."""
        return self.page.now + timedelta(seconds=time.monotonic() - self.page.read_at)

    def upto(self, id: int) -> Progress:
        """Return the progress of a partition that has settled only the messages up to `id`."""
        if not self.messages or self.messages[-1].id == id:
            return self.end
        return Progress(self.window.base, self.window.target, id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The part of the log that a partition reads, after a grace, and up to a position.

    `grace`: for how long rows are left alone after the commit. `stop`: where all partitions meet; None: no end. `ends`:
    nothing follows the stop.
    """

    log: Log
    grace: Grace | None = None
    stop: Position | None = None
    ends: bool = False

    def after(self, progress: Progress, incarnation: str) -> Cursor:
        """Return a cursor that reads on from there, on this incarnation of the server only."""
        return Cursor(self.log.bound_to(incarnation), progress, self.grace, self.stop)


class Cursor:
    """Reads the log batch by batch: a small window in one read, a larger one page by page.

    With a grace a window ends at a position that was captured before, and is always read page by page.
    """

    def __init__(self, log: Log, progress: Progress, grace: Grace | None = None, stop: Position | None = None) -> None:
        """`stop`: read up to this position, which another partition has passed; so no grace is needed."""
        self._log = log
        self._progress = progress
        self._grace = grace if stop is None else None
        self._stop = stop
        #: The newest ripe position without any row between the base and it.
        self._nothing_before: Position | None = None
        self._extent: Extent | None = None
        self._span = _SMALLEST_SPAN

    def read(self, channel: Channel) -> Batch:
        """Return the next batch, and move behind the batch. An empty log moves nothing."""
        if self._stop is not None:
            batch = self._up_to(channel, self._stop)
        elif self._grace is not None:
            batch = self._ripe(channel, self._grace)
        else:
            batch = (self._whole(channel) if self._progress.target is None else None) or self._page(channel)
        if batch.seen:
            self._progress = batch.end
        return batch

    @property
    def due_in(self) -> float:
        """Seconds until a read may bring something because time has passed; infinite without a grace."""
        return math.inf if self._grace is None else self._grace.due_in

    def young(self, channel: Channel) -> Iterator[Batch]:
        """Read what was committed before the first capture and is not ripe yet; nothing without a grace.

        The cursor stays where it is.
        """
        target = None if self._grace is None else self._grace.young
        if target is None:
            return
        ahead = Cursor(self._log, Progress(self._progress.base, target, -1))
        while ahead._progress.target is not None:
            yield ahead.read(channel)

    def move_to(self, progress: Progress) -> None:
        """Go on from this progress, which has been stored."""
        self._progress = progress
        self._extent = None
        self._nothing_before = None

    def follow(self, progress: Progress) -> None:
        """Go on from this progress, which another reader may have stored; what is known of its window still counts."""
        known = self._progress
        if (
            progress.after is None
            or known.after is None
            or (progress.base, progress.target)
            != (
                known.base,
                known.target,
            )
        ):
            if progress != known:
                self.move_to(progress)
        elif progress.after >= known.after:
            self._progress = progress
        else:
            self.move_to(progress)

    def _whole(self, channel: Channel) -> Batch | None:
        """Read everything since the base; None if the rows are too many for a batch, and a window was opened."""
        base = self._progress.base
        page = self._log.read_on(channel, base)
        capture = page.capture
        assert capture is not None
        self._require_ahead(channel, capture)
        end = Progress(capture.position)
        if not page.complete:
            self._extent = None
            end = Progress(base, capture.position, -1 if page.reached is None else page.reached)
            if page.reached is None:
                self._progress = end
                return None
        window = Window(base, capture.position)
        return Batch(page=page, window=window, end=end, seen=page.seen, highest=page.highest)

    def _up_to(self, channel: Channel, stop: Position) -> Batch:
        """Read the next page up to `stop`; if nothing is left, return an empty batch that ends there."""
        if self._progress.target is None and not self._opens(channel, stop):
            return Batch(page=nothing(None), window=Window(self._progress.base, stop), end=Progress(stop), seen=0)
        return self._page(channel)

    def _ripe(self, channel: Channel, grace: Grace) -> Batch:
        """Read the next page of what has been committed for at least the length of the grace."""
        capture = grace.look(lambda: self._log.now(channel))
        if capture is not None:
            self._require_ahead(channel, capture)
        if self._progress.target is None and not self._opens(channel, grace.ripen()):
            return self._idle(capture)
        batch = self._page(channel)
        return batch if capture is None else replace(batch, page=replace(batch.page, capture=capture))

    def _opens(self, channel: Channel, target: Position | None) -> bool:
        """Open the window that ends at `target`, if the window holds any row; return True if so."""
        base = self._progress.base
        if target is None or target in (base, self._nothing_before):
            return False
        extent = self._log.extent(channel, Window(base, target))
        if not extent.last:
            self._nothing_before = target
            return False
        self._progress, self._nothing_before = Progress(base, target, -1), None
        self._extent, self._span = extent, _SMALLEST_SPAN
        return True

    def _idle(self, capture: Capture | None) -> Batch:
        base = self._progress.base
        page = nothing(capture)
        end = Progress(self._nothing_before or base)
        return Batch(page=page, window=Window(base, end.base), end=end, seen=0)

    def _require_ahead(self, channel: Channel, capture: Capture) -> None:
        base = self._progress.base
        if capture.position.head < base.head:
            raise PositionError(
                f"the server is at {capture.position}, behind the stored position {base}: it was restored or replaced."
                " Check that the URL leads to the right database. Then run"
                f" {channel.database.commands.line('doctor')}, which says how to go on"
            )

    def _page(self, channel: Channel) -> Batch:
        """Read the next page of the open window; it is empty where a span of ids held no selected message."""
        base, target, after = self._progress.base, self._progress.target, self._progress.after
        assert target is not None and after is not None
        window = Window(base, target)
        if self._extent is None:
            self._extent = self._rest(channel, window, after)
            self._span = _SMALLEST_SPAN
        after = self._skip_to_rows(self._extent, after)
        upto = min(after + self._span, self._extent.last)
        page = self._log.page(channel, window, self._extent, after, upto)
        if page.complete:
            # The span held few messages, so the next one is wider: rare messages are bounded by the span alone.
            self._span = min(2 * self._span, _WIDEST_SPAN)
        elif page.reached is not None:
            # The span held many messages, so the next one is narrower: with stale statistics a page sorts all of it.
            self._span = min(self._span, max(_SMALLEST_SPAN, 2 * (page.reached - after)))
        reached = upto if page.complete or page.reached is None else page.reached
        end = Progress(target) if reached >= self._extent.last else Progress(base, target, reached)
        return Batch(page=page, window=window, end=end, seen=max(1, page.seen), highest=self._extent.last)

    def _rest(self, channel: Channel, window: Window, after: int) -> Extent:
        """Return where the rows of a window behind `after` lie: often by one probe, because turns may be many."""
        if after < 0 or window.late:
            return self._log.extent(channel, window)
        return Extent.behind(after, self._log.last(channel))

    @staticmethod
    def _skip_to_rows(extent: Extent, after: int) -> int:
        """Return `after`, moved past the ids before the window's first row, or between its late and its fresh part."""
        if extent.late is None or after >= extent.late[1]:
            return max(after, extent.fresh[0] - 1) if extent.fresh else max(after, extent.last)
        return max(after, extent.first - 1)
