"""Care after a process ended in the midst of its work, perhaps by a message.

Each message of that process is handled alone. Before the call a mark is stored in place of the error: the mark tells
the next process under which message the last one ended.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from datetime import timedelta
from threading import Lock

from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.runtime.fork import in_child
from outbox.store.subscriptions.progress import Settled
from outbox.worker.policy import HandlerPolicy

_MARKS = (
    "waits to be handled alone, because a process ended",
    "under way alone, because a process ended",
    "under way alone; its process ended once before",
    "under way alone; its process ended twice before",
)
_ENDED = "its process ended 3 times while this message was handled"


def needs_care(newest: Settled, earlier: Container[int]) -> bool:
    """Return whether a process has ended that had begun to work, and had settled nothing.

    Each lease begins with one settle, and one without another settle ends with a second one. `newest`: the progress.
    `earlier`: the epochs of this process, which has not ended.
    """
    return newest.n == 1 and newest.epoch not in earlier


def to_be_alone(policy: HandlerPolicy) -> Parking:
    """Return the parking of a message of the log that is to be handled alone."""
    return Parking(state="retry", holds=policy.ordered, error=_MARKS[0], delay=timedelta(0))


def is_marked(error: str | None) -> bool:
    """Return whether a parked message with such an error is to be handled alone."""
    return error in _MARKS


def marked(message: Message, error: str | None, policy: HandlerPolicy) -> Parking:
    """Return the parking of a message while it is handled alone, or its parking as a dead letter, without a call.

    The mark counts as an attempt, because the process may end before the attempt is counted. `error`: of the parked
    message so far.
    """
    # After a replay the attempts begin again, although the mark still stands.
    times = min(_MARKS.index(error), message.attempt - 1) if error in _MARKS else 0
    if times + 1 == len(_MARKS):
        return replace(policy.dead(message, _ENDED), attempts=message.attempt - 1)
    return Parking(state="retry", holds=True, attempts=message.attempt, error=_MARKS[times + 1], delay=timedelta(0))


class _Alone:
    """The right of one partition at a time, in a whole process, to handle a message alone.

    Else a message would be marked beside the message that ends the process.
    """

    def __init__(self) -> None:
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        self._lock = Lock()
        self._holder: object | None = None

    def taken(self, by: object) -> bool:
        """Take the right, if nobody else has it; return whether it is taken."""
        with self._lock:
            self._holder = self._holder or by
            return self._holder is by

    def give_back(self, by: object) -> None:
        """Give the right back, if it was taken."""
        with self._lock:
            self._holder = None if self._holder is by else self._holder


ALONE = _Alone()
