"""The watch of a lease by a worker that stands by: it decides when the worker may claim the lease."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from outbox.model.lease import Claim, Holder
from outbox.runtime.clock import clock


class LeaseWatch:
    """Watches a lease by a clock of its own, because the database's clock may step.

    When that steps forward: a lease that was seen to be renewed is claimed only after its holder has not renewed it for
    the holder's length. When it steps back: a lease that was not renewed for that long, and for the watcher's own
    length, is claimed although it has not expired.
    """

    def __init__(self, length: timedelta, now: Callable[[], float] = clock) -> None:
        """`length`: for how long the watcher would take the lease."""
        self._length = length
        self._now = now
        self._seen: Holder | None = None
        self._since = 0.0
        self._moves = False

    def look(self, holder: Holder) -> Claim | None:
        """Take note of the holder as it is now; return the claim that may be made, or None while none may."""
        now, seen = self._now(), self._seen
        if seen is None or (holder.epoch, holder.renewals) != (seen.epoch, seen.renewals):
            # A lease that has not expired at the first look counts as renewed a moment ago.
            self._seen, self._since, self._moves = holder, now, seen is not None or holder.live
        stood_still = now - self._since
        length = holder.length or self._length
        if stood_still > max(length, self._length).total_seconds():
            return Claim(expired=False, seen=holder)
        if not self._moves or stood_still > length.total_seconds():
            return Claim(seen=holder)
        return None
