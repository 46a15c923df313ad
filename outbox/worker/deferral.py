"""Deferral: a handler that cannot find an answer leaves the lease to other processes for a while."""

from __future__ import annotations

import logging
import math

from outbox.runtime.clock import clock
from outbox.runtime.stop import Stop

logger = logging.getLogger("outbox")

#: Seconds for which the lease is left to others: longer than a worker that stands by needs to take it.
DEFERRED_SECONDS = 2.0
#: Seconds for which this process works at least before it leaves the lease to others again: it still has messages that
#: it can handle.
_TURN_SECONDS = 5.0


class Deferral:
    """Asked for by the handler of a subscription, on any thread, and granted by its worker."""

    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        #: Of the work under the present lease; None: the work does not end for a deferral.
        self._stop: Stop | None = None
        self._turn_ends = -math.inf
        #: True from when it is asked for until the lease is taken again.
        self.asked = False
        #: The reasons that were logged as a warning.
        self._logged: set[str] = set()

    def ask(self, why: str) -> None:
        """Give the lease back for a while, because another process may find the answer."""
        stop = self._stop
        if stop is None or stop.asked or clock() < self._turn_ends:
            return
        level = logging.DEBUG if why in self._logged else logging.WARNING
        logger.log(level, "%s: %s; others are let go first for %g s", self._subscription, why, DEFERRED_SECONDS)
        self._logged.add(why)
        self.asked = True
        stop.ask()

    def begin(self, stop: Stop | None) -> None:
        """Note that a lease was taken. `stop`: asked to end the work under the lease; None: the work does not end."""
        if self.asked:
            self._turn_ends = clock() + _TURN_SECONDS
        self._stop = stop
        # Last, because a call that comes back meanwhile would end the work before it begins.
        self.asked = False
