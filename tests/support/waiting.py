"""Waiting for something to come true."""

import time
from collections.abc import Callable


def eventually(fact: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether `fact` comes true in time. Between two looks there is time for others, more if a look takes long."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if fact():
            return True
        ended = time.monotonic()
        if ended > deadline:
            return False
        time.sleep(min(max(0.02, 4 * (ended - began)), 0.5))
