"""The window of a batch read: from the option `since` to `until`, or to now."""

from __future__ import annotations

from outbox.errors import OptionError, PositionError
from outbox.model.position import EARLIEST, Position, Window
from outbox.spark.offset import Mark
from outbox.spark.options import Options
from outbox.spark.planner import Planner
from outbox.store.log.stamp import Server


def window_of(options: Options, planner: Planner) -> Window:
    """Return the window that the options name.

    Raises:
        OptionError: `since` lies after `until`.
        PositionError: a position is of another server, or lies ahead of this one.
    """
    now = planner.now()
    base = _checked("since", options.since, now.server, now.position) if options.since else EARLIEST
    target = _checked("until", options.until, now.server, now.position) if options.until else now.position
    if base.head > target.head:
        raise OptionError(f"since: {base} lies after until, {target}; exchange them")
    return Window(base, target)


def _checked(name: str, mark: Mark, server: Server, now: Position) -> Position:
    if mark.server is not None and mark.server != server:
        raise PositionError(
            f"{name}: the position is of another server, timeline or outbox ({server.unlike(mark.server)}), and means"
            " nothing here; take one from outbox.spark.position() for this url, or read the database that it is of"
        )
    if mark.position.head > now.head:
        raise PositionError(
            f"{name}: {mark.position} lies ahead of this server, which has come to {now}; it is of another one, or of"
            " one that was restored from an older copy"
        )
    return mark.position
