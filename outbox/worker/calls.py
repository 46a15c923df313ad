"""Calls of a handler on a thread of their own, so that one that hangs can be left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue

from outbox.message import Message
from outbox.verdict import Done, Reject, Retry, Unavailable, Verdict

Handler = Callable[[Sequence[Message]], Sequence[Verdict]]


class StrangeAnswerError(TypeError):
    """A handler returned something else than a verdict for each message; raised for it, on its own thread."""


_VERDICTS: frozenset[type] = frozenset((Done, Retry, Reject, Unavailable))


#: How much larger a call may be than the one before.
_GROWTH = 8


def next_size(size: int, call: int, took: float, *, allowed: float, most: int) -> int:
    """How many messages the next call may hold: as many as fit into the `allowed` seconds, growing step by step.

    `size`: how many the last one could have held; `call`: how many it held; `took`: its seconds.
    """
    fitting = int(allowed * call / max(took, 1e-6))
    return max(1, min(most, fitting, max(size, call * _GROWTH)))


class Call:
    """One call of the handler: under way, or finished with verdicts or an error."""

    __slots__ = ("_finished", "blamed", "error", "messages", "started", "verdicts")

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.verdicts: Sequence[Verdict] | None = None
        self.error: BaseException | None = None
        #: Whether an attempt was counted for it while it hung.
        self.blamed = False
        self.started = time.monotonic()
        self._finished = threading.Event()

    @property
    def finished(self) -> bool:
        """Whether the handler has come back."""
        return self._finished.is_set()

    @property
    def seconds(self) -> float:
        """How long ago the call began."""
        return time.monotonic() - self.started

    def wait(self, seconds: float) -> bool:
        """Wait for the handler to come back."""
        return self._finished.wait(seconds)

    def perform(self, handler: Handler) -> None:
        """Call the handler and keep what came of it."""
        try:
            self.verdicts = self._checked(handler(self.messages))
        except BaseException as error:
            # A handler that wants to end the interpreter ends its thread only: nobody would wait for the next call.
            self.error = error
        finally:
            self._finished.set()

    def _checked(self, answer: Collection[Verdict]) -> list[Verdict]:
        """The verdicts, if that is what a handler returned."""
        if not isinstance(answer, Collection):
            raise StrangeAnswerError(f"a handler must return verdicts, not {type(answer).__name__}")
        verdicts = list(answer)
        if len(verdicts) != len(self.messages):
            raise StrangeAnswerError(f"{len(verdicts)} verdicts for {len(self.messages)} messages")
        if strange := {type(verdict) for verdict in verdicts} - _VERDICTS:
            raise StrangeAnswerError(f"a handler must return verdicts, not {strange.pop().__name__}")
        return verdicts


class Caller:
    """Performs one call at a time; when one hangs, the next goes to a fresh thread."""

    def __init__(self, handler: Handler, left_behind: list[Call] | None = None) -> None:
        """`left_behind` gets the calls that hang when the next one begins, or when nobody waits any more."""
        self._handler = handler
        self._left_behind = [] if left_behind is None else left_behind
        self._queue: SimpleQueue[Call | None] | None = None
        self._last: Call | None = None

    def start(self, messages: Sequence[Message]) -> Call:
        """Begin a call and return at once."""
        call = Call(messages)
        if self._queue is None or (self._last is not None and not self._last.finished):
            self._new_thread()
        assert self._queue is not None
        self._queue.put(call)
        self._last = call
        return call

    def close(self) -> None:
        """Let the thread end when its call is over. Threads cannot be killed, so nobody waits for it."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None
        if self._last is not None and not self._last.finished:
            self._left_behind.append(self._last)
        self._last = None

    def _new_thread(self) -> None:
        self.close()
        self._queue = SimpleQueue()
        threading.Thread(target=self._work, args=(self._queue,), name="outbox-handler", daemon=True).start()

    def _work(self, queue: SimpleQueue[Call | None]) -> None:
        while (call := queue.get()) is not None:
            call.perform(self._handler)
