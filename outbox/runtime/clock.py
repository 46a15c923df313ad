"""Our own clock: it measures how long something took or may take, and is never compared with another machine's."""

from __future__ import annotations

import time


def clock() -> float:
    """Return seconds that never go back; where the system can measure it, they go on while it is suspended."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)
