"""Calls in portions: a handler gets few messages at a time, and a portion that hangs holds no other messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outbox.model.message import Message
from outbox.model.verdict import DONE, Retry, Verdict, describe
from outbox.worker.calls import Call, Handler


@dataclass(frozen=True, slots=True, kw_only=True)
class Portions:
    """The way in which a call hands its messages over.

    `size`: so many messages at once; the deadline counts for each portion. `seconds`: later in a call no portion
    begins. `in_order`: nothing behind a failed message of a key is handed over. `suspend`: nothing behind any failed
    message is.
    """

    size: int
    seconds: float
    in_order: bool = True
    suspend: bool = False


class PortionedCall(Call):
    """A call that hands its messages over in portions. Each portion is answered before the next one begins.

    An exception of the handler is a failure of the messages in the portion. A call that is left behind holds the
    messages of the portion under way, and hands over no others.
    """

    __slots__ = ("_answers", "_left", "_lock", "_portions", "_under_way", "early")

    def __init__(self, *call: Any, portions: Portions, **options: Any) -> None:
        """`call`, `options`: the arguments of a `Call`."""
        super().__init__(*call, **options)
        self._portions = portions
        #: Held from one portion to the next, and to leave the call behind.
        self._lock = threading.Lock()
        self._under_way: list[Message] = []
        self._left = False
        self._answers: list[tuple[Message, Verdict]] = []
        #: The answers from before the call was left behind.
        self.early: list[tuple[Message, Verdict]] = []

    @property
    def answers(self) -> list[tuple[Message, Verdict]]:
        """The answered messages with their verdicts; after the call was left behind, the late answers."""
        return self._answers

    def perform(self, handler: Handler) -> None:
        """Hand over one portion after the other, until a stop is asked, or too little time is left for another."""
        failed: set[str | None] = set()
        until = time.monotonic() + self._portions.seconds
        for portion in self._next(failed):
            if not self._begin(portion, until):
                break
            try:
                verdicts = handler(portion)
            except BaseException as error:
                # Also SystemExit: it would end only this thread, and then nothing would perform the next call.
                verdicts = [Retry(describe(error))] * len(portion)
            if not self._answer(portion, verdicts):
                break
            if verdicts.count(DONE) < len(portion):
                failed.update(m.key for m, verdict in zip(portion, verdicts, strict=True) if verdict is not DONE)
                if self._portions.suspend:
                    break
        self.late = not (self._answers or self._left)
        self._ended = time.monotonic()

    def leave_behind(self) -> bool:
        """Go on without the call; return False if its portion has come back meanwhile."""
        with self._lock:
            if self.finished or not self.over:
                return False
            self._left = True
            self.messages = self._under_way
            self.early, self._answers = self._answers, []
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

    def _begin(self, portion: list[Message], until: float) -> bool:
        """Begin a portion, unless it is too late; the first portion may always begin within the lease."""
        if self._is_late() or (self._held is not None and self._held.stop.asked):
            return False
        with self._lock:
            now = time.monotonic()
            if self._left or (now > until and self._answers):
                return False
            self._under_way = portion
            self.started = now
            return True

    def _answer(self, portion: list[Message], verdicts: Any) -> bool:
        """Note the verdicts of a portion; return False if the call was left behind."""
        with self._lock:
            self._answers.extend(zip(portion, verdicts, strict=True))
            return not self._left
