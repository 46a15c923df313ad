"""Continuing an archive: finds the next window, and checks without Spark that it may be added."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from outbox.errors import ArchiveError, PositionError, PurgedError
from outbox.model.position import EARLIEST, Position, Window
from outbox.spark.planner import ROWS_PER_TASK, Planner
from outbox.spark.registration import Registration
from outbox.store.log.stamp import Stamp

if TYPE_CHECKING:
    from outbox.spark.manifest import Archive, Manifest
    from outbox.spark.place import Place


#: A window without rows is committed only this long after the window before it. So an idle archive has few manifests,
#: and its position, which retention waits for, stays recent.
EMPTY_AFTER = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """The settings of an extract.

    `topics`: only these; None: all. `halves`: also half messages. `register`: the name under which retention waits.
    `accept_gap`: go on although messages were purged before they were extracted; the manifest notes it.
    `accept_server`: go on although another server, or another timeline, has the database now.
    """

    topics: tuple[str, ...] | None = None
    halves: bool = False
    register: Registration | None = None
    delta: bool = False
    accept_gap: bool = False
    accept_server: bool = False
    rows_per_task: int = ROWS_PER_TASK
    empty_after: timedelta = EMPTY_AFTER


#: Every message except half messages.
EVERYTHING = Extraction()


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """The next window of an archive.

    `gone`: the position of what was purged before the window is read; None: nothing. `gap`: the same position, if
    messages of this window were purged and the caller accepts that.
    """

    stamp: Stamp
    window: Window
    gone: Position | None
    gap: Position | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """Decides whether an extract can continue an archive, and with which window."""

    archive: Archive
    place: Place
    wanted: Extraction
    planner: Planner

    def require_same_messages(self, last: Manifest | None) -> None:
        """Refuse an extract of other topics, or with other half messages, than the archive has.

        Raises:
            ArchiveError: the archive holds other topics; or only one of the two, archive or extract, has half messages.
        """
        wanted = self.wanted
        if last is None or (last.topics, last.halves) == (wanted.topics, wanted.halves):
            return
        has = "all topics" if last.topics is None else f"the topics {','.join(last.topics)}"
        halves = "with" if last.halves else "without"
        raise ArchiveError(
            f"{self.archive.path} holds {has} {halves} half messages; other messages of the windows that it has"
            " would be missing. Extract the same, or to another folder"
        )

    def next(self, last: Manifest | None) -> Next:
        """Return the window from where the archive ends to now.

        Raises:
            PurgedError: messages were purged before they were extracted.
            PositionError: the archive is of another server, or the server has lost messages that the archive has.
        """
        stamp = self.planner.now()
        self._require_same_server(last, stamp)
        window = Window(EARLIEST if last is None else last.until, stamp.position)
        # Read once, here: rows that are purged later are noticed when the window is read.
        gone = self.planner.purged()
        return Next(stamp=stamp, window=window, gone=gone, gap=self._gap(window, gone))

    def _require_same_server(self, last: Manifest | None, stamp: Stamp) -> None:
        if last is None:
            return
        if last.server != stamp.server and not self.wanted.accept_server:
            raise PositionError(
                f"{self.archive.path} was extracted from another server, timeline or outbox"
                f" ({stamp.server.unlike(last.server)}), so its position means nothing here, and messages could be"
                " missed. Extract to another folder; or, if this server goes on with the same ids (after pg_upgrade, or"
                " a failover that lost nothing), accept it: --accept-server, or accept_server=True"
            )
        if stamp.position.head < last.until.head:
            raise PositionError(
                f"{self.archive.path} is at {last.until}, but {self.place.primary_label()} only at {stamp.position}:"
                " the database has gone back, to a backup say, and draws ids anew that the archive has. Extract to"
                " another folder"
            )

    def _gap(self, window: Window, gone: Position | None) -> Position | None:
        """Return `gone` if messages of the window were purged and the caller accepts that; None if none were.

        The first window begins with the messages that exist, so it has no gap.

        Raises:
            PurgedError: messages of the window were purged, and the caller does not accept that.
        """
        if window.base == EARLIEST or gone is None or not window.overlaps(gone):
            return None
        if self.wanted.accept_gap:
            return gone
        raise PurgedError(
            f"messages after {window.base}, where {self.archive.path} ends, were purged before they were extracted:"
            f" purge has come to {gone}. Keep them longer (outbox purge --older-than), or let retention wait for this"
            " extract (--register NAME --hold 30d). To go on with what is left, and have the gap noted in the manifest:"
            " --accept-gap, or accept_gap=True"
        )


def require_possible(archive: Archive, place: Place, wanted: Extraction) -> None:
    """Refuse an extract that could not add a window, before Spark is started for it; nothing is written.

    Raises:
        ArchiveError: the archive cannot be read or written, or holds other messages.
        PurgedError: messages were purged before they were extracted.
        PositionError: the archive is of another server, or the server has lost messages that the archive has.
        SubscriptionError: the archive cannot be registered under the name.
        DatabaseError: the database cannot be reached, or refuses.
    """
    last = archive.last()
    archive.require_writable()
    with closing(Planner(place)) as planner:
        continuation = Continuation(archive, place, wanted, planner)
        continuation.require_same_messages(last)
        continuation.next(last)
    if wanted.register is not None:
        wanted.register.require_possible(place, archive, last)
