"""How many messages the next call may have: as many as a share of its deadline allows."""

from __future__ import annotations

#: A call should take no more than this share of its deadline.
_SHARE_OF_DEADLINE = 0.25
#: How much larger a call may be than the one before.
_GROWTH = 8
#: After a call that hung, a call has so many times fewer messages, because all messages of a hung call are held.
_CAUTION = 8


def next_size(size: int, call: int, took: float, *, allowed: float, most: int) -> int:
    """Return how many messages the next call may have: as fit into the `allowed` seconds, growing step by step.

    `size`: the limit of the last call; `call`: its messages; `took`: its seconds.
    """
    fitting = int(allowed * call / max(took, 1e-6))
    return max(1, min(most, fitting, max(size, call * _GROWTH)))


class BatchSize:
    """The size of calls, adapted to how long calls take and to whether they come back."""

    def __init__(self, *, least: int, most: int, deadline: float) -> None:
        """`least` and `most`: the limits of a call, in messages. `deadline`: of a call, in seconds."""
        self._least = least
        self._limit = self._most = most
        self._allowed = deadline * _SHARE_OF_DEADLINE
        #: Messages that were accepted since `_most` was set.
        self._accepted = 0
        #: The messages that the next call may have.
        self.next = least

    def came_back(self, count: int, took: float) -> None:
        """Note that a call with `count` messages came back with verdicts after so many seconds."""
        if self._accepted >= self._limit:
            self._most, self._accepted = min(2 * self._most, self._limit), 0
        self.next = max(self._least, next_size(self.next, count, took, allowed=self._allowed, most=self._most))

    def accepted(self, count: int) -> None:
        """Note that so many messages were accepted."""
        self._accepted += count

    def hung(self) -> None:
        """Note that a call did not come back in time."""
        self._most, self._accepted = max(1, self._most // _CAUTION), 0

    def one(self) -> None:
        """Let the next call have one message, because then a failure shows which message failed."""
        self.next = 1
