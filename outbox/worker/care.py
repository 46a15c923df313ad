"""Care after a process ended in the midst of its work, perhaps by a message.

Each message of that process is handled alone. Before the call a mark is stored in place of the error: the mark tells
the next process under which message the last one ended.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from dataclasses import replace
from datetime import timedelta
from threading import Lock

from outbox.model.message import Message
from outbox.model.parking import Parking, States
from outbox.runtime.fork import in_child
from outbox.runtime.named import named
from outbox.store.subscriptions.parked import Ready
from outbox.store.subscriptions.progress import Settled
from outbox.worker.policy import HandlerPolicy

logger = logging.getLogger("outbox")

#: The errors of messages that are to be handled alone.
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


class Care:
    """The care of one partition: which messages are handled alone, and which is the next one.

    Messages of the log are parked first, and then handled like those that were parked before.
    """

    def __init__(self, policy: HandlerPolicy, begun: set[int | None], most: int) -> None:
        """`most`: so many messages of the log are handled alone; 0: the last process ended in order.

        `begun`: over all leases, the messages that this process has begun to handle alone, by log id.
        """
        self._policy = policy
        self._begun = begun
        #: So many messages of the log are still to be parked.
        self.in_log = self._most = most
        #: So many parked messages are handled alone, marked or not; None: all that are ready at first. What is parked
        #: behind another message has no mark.
        self._parked: int | None = None if most else 0
        #: True while a parked message is handled alone. `awaits_turn`: another partition of this process does so now.
        self.alone = self.awaits_turn = False

    @property
    def goes_on(self) -> bool:
        """True while messages are handled alone, because a message may have ended a process."""
        return self.in_log > 0 or self.alone

    def park(self, messages: list[Message], subscription: str) -> list[tuple[Message, Parking]]:
        """Return how messages of the log are parked: all, or the first where the others wait for the first."""
        if self.in_log == self._most:
            text = "%s: a process ended in the midst of its work; its messages are handled one by one"
            logger.warning(text, subscription, extra=named("handled_alone", subscription=subscription))
        first = messages[:1] if self._policy.suspend else messages
        self.in_log = max(0, self.in_log - len(first))
        self._parked = (self._parked or 0) + len(first)
        parking = Parking(state=States.RETRY, holds=self._policy.ordered, error=_MARKS[0], delay=timedelta(0))
        return [(message, parking) for message in first]

    def log_ends(self) -> None:
        """Note that the log has no more messages, so the last process had no more."""
        self.in_log = 0

    def next(self, ready: list[Ready]) -> list[Ready]:
        """Return the ready messages; only the first, while messages are handled alone."""
        number = len(ready) if self._parked is None else self._parked
        self.alone = bool(ready) and (number > 0 or any(each.error in _MARKS for each in ready))
        self._parked = number if self.alone else 0
        return ready[:1] if self.alone else ready

    def begin(self, message: Message, error: str | None) -> Parking | None:
        """Return how a message is parked before its call, so that the next process knows; or as a dead letter.

        `error`: of the parked message so far. None: no other call is under way, and the message is parked so already;
        or, with `awaits_turn`, the call has to wait.
        """
        self.awaits_turn = not ALONE.taken(self)
        return None if self.awaits_turn or message.id in self._begun else under_way(message, error, self._policy)

    def began(self, message: Message) -> None:
        """Note that a message is parked as under way."""
        self._begun.add(message.id)

    def settled(self, messages: Iterable[Message]) -> None:
        """Note that the calls of messages are over."""
        self._begun.difference_update(message.id for message in messages)

    def end(self) -> None:
        """Count the first of the ready messages, unless it awaits its turn; let another partition have a turn."""
        if self.alone and not self.awaits_turn:
            self._parked = max(0, (self._parked or 0) - 1)
        ALONE.give_back(self)


def under_way(message: Message, error: str | None, policy: HandlerPolicy) -> Parking:
    """Return the parking of a message while it is handled alone, or its parking as a dead letter, without a call.

    The mark counts as an attempt, because the process may end before the attempt is counted. `error`: of the parked
    message so far.
    """
    # After a replay the attempts begin again, although the mark still stands.
    times = min(_MARKS.index(error), message.attempt - 1) if error in _MARKS else 0
    if times + 1 == len(_MARKS):
        return replace(policy.dead(message, _ENDED), attempts=message.attempt - 1)
    return Parking(
        state=States.RETRY, holds=True, attempts=message.attempt, error=_MARKS[times + 1], delay=timedelta(0)
    )


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
