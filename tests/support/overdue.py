"""Calls past their deadline because a test says so, and not because real time has passed."""

import time
from collections.abc import Callable, Sequence

from outbox.model.message import Message
from outbox.model.verdict import Verdict
from outbox.senders.opening import open_sender
from outbox.worker.calls import Call, Caller, Handler
from outbox.worker.shared import SharedSender
from tests.support.destination import Destination

#: No call of a test takes that long.
_NEVER_SECONDS = 3600.0
#: How often to look at a call, which may pass its deadline at any moment.
_LOOK_SECONDS = 0.01


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


def overdue(destination: Destination, *, deadlines: float = 3) -> SharedSender:
    """A destination whose calls are past so many deadlines when it hangs, and past none when it does not."""
    shared = SharedSender(open_sender(destination))
    # The test may make it hang later, or no longer.
    shared.caller = OverdueCaller(lambda messages: destination.hanging(messages), deadlines=deadlines)  # noqa: PLW0108
    return shared
