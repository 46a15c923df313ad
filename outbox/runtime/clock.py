"""Our own clock: it measures how long something took or may take, and is never compared with another machine's."""

from __future__ import annotations

import time


def clock() -> float:
    """Seconds that never go back, and go on during a suspend where the system can tell."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)
