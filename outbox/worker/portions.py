"""Calls in portions: a handler gets few messages at a time, and a portion that hangs holds no other messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from outbox.model.message import Message
from outbox.model.verdict import DONE, Retry, Verdict, describe
from outbox.worker.calls import Call, Handler, verdicts_of
from outbox.worker.policy import Portions

#: So often a call looks whether it may go on. The lease lasts for much longer after each look.
_LOOK_SECONDS = 0.001


class PortionedCall(Call):
    """A call that hands its messages over in portions. Each portion is answered before the next one begins.

    An exception of the handler is a failure of the messages in the portion. A call that is left behind holds the
    messages of the portion under way, and hands over no others.
    """

    __slots__ = ("_left", "_lock", "_portions", "_tell", "_under_way", "answered", "early")

    def __init__(
        self, *call: Any, portions: Portions, tell: Callable[[PortionedCall], None] = lambda _: None, **options: Any
    ) -> None:
        """`call`, `options`: the arguments of a `Call`. `tell`: called at the end, on the handler's thread."""
        super().__init__(*call, **options)
        self._portions = portions
        self._tell = tell
        #: Held from one portion to the next, and to leave the call behind.
        self._lock = threading.Lock()
        self._under_way: list[Message] = []
        self._left = False
        #: The answered messages, and their verdicts; after the call was left behind, those with late answers.
        self.answered: list[Message] = []
        self.verdicts: list[Verdict] = []
        #: The messages that were answered before the call was left behind, and their verdicts.
        self.early: tuple[list[Message], list[Verdict]] = ([], [])

    @property
    def answers(self) -> list[tuple[Message, Verdict]]:
        """The answered messages with their verdicts; after the call was left behind, the late answers."""
        return list(zip(self.answered, self.verdicts, strict=True))

    def perform(self, handler: Handler) -> None:
        """Hand over one portion after the other, until a stop is asked, or too little time is left for another."""
        failed: set[str | None] = set()
        began = time.monotonic()
        look_at = 0.0
        for portion in self._next(failed):
            now = time.monotonic()
            if now >= look_at:
                if not self._may_go_on(now - began):
                    break
                look_at = now + _LOOK_SECONDS
            if not self._begin(portion, now):
                break
            verdicts = _answered(handler, portion)
            if not self._answer(portion, verdicts):
                break
            if verdicts.count(DONE) < len(portion):
                failed.update(m.key for m, verdict in zip(portion, verdicts, strict=True) if verdict is not DONE)
                if self._portions.suspend:
                    break
        self.late = not (self.answered or self._left)
        self._ended = time.monotonic()
        self._tell(self)

    def leave_behind(self) -> bool:
        """Go on without the call; return False if its portion has come back meanwhile."""
        with self._lock:
            if self.finished or not self.over:
                return False
            self._left = True
            self.messages = self._under_way
            self.early = self.answered, self.verdicts
            self.answered, self.verdicts = [], []
            return True

    def _next(self, failed: set[str | None]) -> Iterator[list[Message]]:
        """Yield the portions, without messages of keys that have failed by then."""
        size, in_order = self._portions.size, self._portions.in_order
        portion: list[Message] = []
        for message in self.messages:
            if in_order and failed and message.key is not None and message.key in failed:
                continue
            portion.append(message)
            if len(portion) == size:
                yield portion
                portion = []
        if portion:
            yield portion

    def _may_go_on(self, seconds: float) -> bool:
        """Return whether another portion may begin; the first may, however long the call has waited for its turn."""
        stopped = self._held is not None and self._held.stop.asked
        return not (self._is_late() or stopped or (seconds > self._portions.seconds and self.answered))

    def _begin(self, portion: list[Message], now: float) -> bool:
        """Begin a portion; return False if the call was left behind."""
        with self._lock:
            if not self._left:
                self._under_way, self.started = portion, now
            return not self._left

    def _answer(self, portion: list[Message], verdicts: Sequence[Verdict]) -> bool:
        """Note the verdicts of a portion; return False if the call was left behind."""
        with self._lock:
            self.answered += portion
            self.verdicts += verdicts
            return not self._left


def _answered(handler: Handler, portion: list[Message]) -> list[Verdict]:
    try:
        return verdicts_of(handler, portion)
    except BaseException as error:
        # Also SystemExit: it would end only this thread, and then nothing would perform the next call.
        return [Retry(describe(error))] * len(portion)
