"""Our own clock: measures how long work takes or may take; never compared with another machine's clock."""

from __future__ import annotations

import time


def clock() -> float:
    """Return seconds that never go back; where the system can, they include the time of a suspension."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)
