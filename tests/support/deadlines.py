"""Deadlines that pass when a test says so: no other call is late, however slow the machine is."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from outbox import Message, Verdict
from outbox.cli.relaying import Relaying
from outbox.senders.opening import open_sender
from outbox.worker.calls import Call, Caller, Handler
from outbox.worker.shared import SharedSender
from tests.support.destination import Destination

#: No call of a test takes that long.
_NEVER_SECONDS = 3600.0
#: How often to look at a call, which may pass its deadline at any moment.
_LOOK_SECONDS = 0.01


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
        return call.started if call in late else time.monotonic() + _LOOK_SECONDS

    def hangs(call: Call) -> bool:
        return call in late and not call.finished

    with patch.object(Call, "due", property(due)), patch.object(Call, "hangs", property(hangs)):
        yield


class OverdueCaller(Caller):
    """By its clock a call that hangs is past its deadline when the handler has it, and no other call ever is."""

    def __init__(
        self, hangs: Callable[[Sequence[Message]], bool], *, deadlines: float = 3, concurrency: int = 1
    ) -> None:
        """`hangs`: asked when the handler is called. `deadlines`: how many have passed then; after three nobody waits
        for the call.
        """
        super().__init__(concurrency)
        self._hangs, self._deadlines = hangs, deadlines

    def begin(self, call: Call, handler: Handler) -> None:
        """Have a call made, with a deadline that passes only when the handler hangs."""
        call.deadline = _NEVER_SECONDS

        def timed(messages: Sequence[Message]) -> Sequence[Verdict]:
            if self._hangs(messages) and call.started is not None:
                call.started -= self._deadlines * call.deadline
            return handler(messages)

        super().begin(call, timed)

    def look(self, call: Call) -> float:
        """Look again soon."""
        return min(super().look(call), time.monotonic() + _LOOK_SECONDS)


def overdue_when_hanging(destination: Destination, *, deadlines: float = 3) -> SharedSender:
    """A destination whose calls are past so many deadlines when it hangs, and past none when it does not."""
    shared = SharedSender(open_sender(destination))
    # The test may make it hang later, or no longer.
    shared.caller = OverdueCaller(lambda messages: destination.hanging(messages), deadlines=deadlines)  # noqa: PLW0108
    return shared


@contextmanager
def patience_ends_with_a_refusal() -> Iterator[None]:
    """Have a relay of the command line give up when its destination has refused a message, and by no clock."""
    with patch.object(Relaying, "_silent", property(lambda relaying: bool(relaying._refusal))):
        yield


def an_hour_passes() -> None:
    """Set the clock of the loop that runs here forward, so that the deadline of every coroutine is over."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + 3600  # type: ignore[method-assign]
