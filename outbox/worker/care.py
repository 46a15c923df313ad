"""Care after a process ended in the midst of its work, perhaps by a message.

Each message of that process is handled alone. Before the call a mark is stored in place of the error: the mark tells
the next process under which message the last one ended.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.store.subscriptions.progress import Settled
from outbox.worker.policy import HandlerPolicy

_MARKS = (
    "waits to be handled alone, because a process ended",
    "under way alone, because a process ended",
    "under way alone; its process ended once before",
    "under way alone; its process ended twice before",
)
_ENDED = "its process ended 3 times while this message was handled"


def needs_care(lease: Lease, newest: Settled) -> bool:
    """Return whether the process before has ended with its lease, and had settled nothing under the lease.

    After a process with a settle the next process begins further on, without care. `newest`: the progress.
    """
    # Each lease begins with one settle.
    some_settled = newest.epoch == lease.epoch - 1 and newest.n > 1
    return lease.abandoned and not some_settled


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
