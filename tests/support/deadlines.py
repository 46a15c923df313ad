"""Deadlines that pass when a test says so: no other call is late, however slow the machine is."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from outbox import Message
from outbox.worker.calls import Call


@contextmanager
def overdue(is_late: Callable[[Sequence[Message]], bool]) -> Iterator[None]:
    """Calls are past three deadlines from when `is_late` says so of their messages, and never by the time they take."""
    late: list[Call] = []

    def due(call: Call) -> float:
        if call.started is None:
            return math.inf
        if call not in late and not call.finished and is_late(call.messages):
            late.append(call)
        # A call that is not late yet is looked at every few milliseconds.
        return call.started if call in late else time.monotonic() + 0.01

    def hangs(call: Call) -> bool:
        return call in late and not call.finished

    with patch.object(Call, "due", property(due)), patch.object(Call, "hangs", property(hangs)):
        yield


def an_hour_passes() -> None:
    """Set the clock of the loop that runs here forward, so that the deadline of every coroutine is over."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + 3600  # type: ignore[method-assign]
