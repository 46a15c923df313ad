"""Waiting for something to come true."""

import time
from collections.abc import Callable


def eventually(fact: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether `fact` comes true in time."""
    deadline = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
