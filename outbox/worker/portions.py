"""Calls in portions: a handler gets few messages at a time, and a portion that hangs holds no other messages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from outbox.model.message import Message
from outbox.model.verdict import BEHIND, DONE, Reject, Verdict, failure_of
from outbox.worker.calls import Call, Handler, verdicts_of
from outbox.worker.policy import Portions

logger = logging.getLogger("outbox")
#: So often a call looks whether it may go on. The lease lasts for much longer after each look.
_LOOK_SECONDS = 0.001


class PortionedCall(Call):
    """A call that hands its messages over in portions. Each portion is answered before the next one begins.

    An exception of the handler is a failure of the messages in the portion. A call that is left behind holds the
    messages of the portion under way, and hands over no others.
    """

    __slots__ = ("_answered", "_early", "_lock", "_portions", "_tell", "_under_way")

    def __init__(
        self,
        *call: Any,
        portions: Portions,
        tell: Callable[[list[Message], list[Verdict], float], None],
        **options: Any,
    ) -> None:
        """`call`, `options`: the arguments of a `Call`. `tell`: called at the end with the answers and the seconds."""
        super().__init__(*call, **options)
        self._portions = portions
        self._tell = tell
        #: Held to begin and to answer a portion, and to leave the call behind.
        self._lock = threading.Lock()
        self._under_way: list[Message] = []
        self._answered: list[Message] = []
        self.verdicts: list[Verdict] = []
        #: How many messages were answered when the call was left behind.
        self._early: int | None = None

    @property
    def answered(self) -> tuple[list[Message], list[Verdict]]:
        """The answered messages and their verdicts, without late answers."""
        return self._answered[: self._early], self.verdicts[: self._early]

    @property
    def answers(self) -> list[tuple[Message, Verdict]]:
        """The answered messages with their verdicts; after the call was left behind, only the late answers."""
        early = self._early or 0
        return list(zip(self._answered[early:], self.verdicts[early:], strict=True))

    def leave_behind(self, *, overdue: bool = True) -> bool:
        """Go on without the call; return False if it has come back meanwhile, or is not `overdue` and has to be."""
        with self._lock:
            self.left = not self.finished and (self.over or not overdue)
            if self.left:
                self.messages, self._early = self._under_way, len(self._answered)
            return self.left

    def _hand_over(self, handler: Handler) -> None:
        """Hand over one portion after the other, until a stop is asked, or too little time is left for another."""
        failed: set[str | None] = set()
        began, look_at, due = time.monotonic(), 0.0, self.due
        for portion in self._next(failed):
            now = time.monotonic()
            if now >= look_at:
                if not self._may_go_on(now - began):
                    break
                look_at = now + _LOOK_SECONDS
            with self._lock:
                if self.left or now >= due:
                    # Left behind, or the turn was lost with the deadline of the last portion.
                    break
                self._under_way, self.started, due = portion, now, now + self.deadline
            try:
                verdicts = self._in_order(portion, verdicts_of(handler, portion))
            except BaseException as error:
                # Also SystemExit: it would end only this thread, and then nothing would perform the next call.
                verdicts = [failure_of(error)] * len(portion)
            with self._lock:
                self._answered += portion
                self.verdicts += verdicts
                self._under_way = []
            if verdicts.count(DONE) < len(portion):
                failed.update(m.key for m, verdict in zip(portion, verdicts, strict=True) if verdict is not DONE)
                if self._portions.suspend:
                    break
        self.late = not (self._answered or self.left)
        if self._answered:
            self._tell(self._answered, self.verdicts, self.seconds)

    def _in_order(self, portion: list[Message], verdicts: list[Verdict]) -> list[Verdict]:
        """Take no message for done that stands behind the first failed one of its key: it comes again in its turn."""
        if not self._portions.in_order or len(portion) == 1 or verdicts.count(DONE) == len(portion):
            return verdicts
        failed: set[str] = set()
        kept: list[Verdict] = []
        for message, verdict in zip(portion, verdicts, strict=True):
            behind = verdict is DONE and message.key in failed
            if behind and self._portions.log.allows("behind"):
                logger.warning(
                    "a handler says that messages are done behind a failed one of their key (topic %s): they are"
                    " handled again after it; stop at the first failure of a key, and answer Retry for the rest",
                    message.topic,
                )
            holds = verdict is not DONE and not (self._portions.passes_dead and isinstance(verdict, Reject))
            if holds and message.key is not None:
                failed.add(message.key)
            kept.append(BEHIND if behind else verdict)
        return kept

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
        return not (self._is_late() or stopped or (seconds > self._portions.seconds and self._answered))
