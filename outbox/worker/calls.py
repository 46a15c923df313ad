"""Calls of a handler on a thread of their own, so that one that hangs can be left behind."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from queue import SimpleQueue

from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.verdict import Done, Reject, Retry, Unavailable, Verdict
from outbox.runtime.clock import clock
from outbox.runtime.fork import in_child
from outbox.worker.known import KnownOutcomes

Handler = Callable[[Sequence[Message]], Sequence[Verdict]]


class StrangeAnswerError(TypeError):
    """Raised on the handler's thread, when the handler returned something else than a verdict for each message."""


_VERDICTS: frozenset[type] = frozenset((Done, Retry, Reject, Unavailable))


#: How much larger a call may be than the one before.
_GROWTH = 8


def next_size(size: int, call: int, took: float, *, allowed: float, most: int) -> int:
    """Return how many messages the next call may have: as fit into the `allowed` seconds, growing step by step.

    `size`: how many the last one could have had; `call`: how many it had; `took`: its seconds.
    """
    fitting = int(allowed * call / max(took, 1e-6))
    return max(1, min(most, fitting, max(size, call * _GROWTH)))


class Call:
    """One call of the handler: under way, or finished with verdicts or an error, or without having begun."""

    __slots__ = (
        "_begin_before", "_finished", "blamed", "error", "late", "lease", "messages", "started", "verdicts", "void"
    )  # fmt: skip

    def __init__(self, messages: Sequence[Message], begin_before: float = math.inf, lease: Lease | None = None) -> None:
        """`begin_before`: the moment, by `clock`, from which on the handler is not called any more.

        `lease`: the one under which the call is made.
        """
        self.messages = messages
        self.lease = lease
        #: True when its verdicts do not count, because others may have handled its messages since it was made.
        self.void = False
        self._begin_before = begin_before
        #: True when the call came to its thread too late, and was not made.
        self.late = False
        self.verdicts: Sequence[Verdict] | None = None
        self.error: BaseException | None = None
        #: True when an attempt was counted for it while it hung.
        self.blamed = False
        self.started = time.monotonic()
        self._finished = threading.Event()

    @property
    def finished(self) -> bool:
        """True when the handler has come back."""
        return self._finished.is_set()

    @property
    def seconds(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.started

    @property
    def answers(self) -> list[tuple[Message, Verdict]]:
        """The messages with their verdicts; empty if the handler gave none."""
        return list(zip(self.messages, self.verdicts or (), strict=False))

    def wait(self, seconds: float) -> bool:
        """Wait for the handler to come back; return False when it has not within so many seconds."""
        return self._finished.wait(seconds)

    def perform(self, handler: Handler) -> None:
        """Call the handler, and keep its verdicts or its error."""
        try:
            # Checked here, right before the call: another thread started it, and both may have been suspended since.
            self.late = clock() >= self._begin_before
            if not self.late:
                self.verdicts = self._checked(handler(self.messages))
        except BaseException as error:
            # Also SystemExit: it would end only this thread, and then nothing would perform the next call.
            self.error = error
        finally:
            self._finished.set()

    def _checked(self, answer: Collection[Verdict]) -> list[Verdict]:
        """Return the verdicts; raise if the handler returned something else."""
        if not isinstance(answer, Collection):
            raise StrangeAnswerError(f"a handler must return verdicts, not {type(answer).__name__}")
        verdicts = list(answer)
        if len(verdicts) != len(self.messages):
            raise StrangeAnswerError(f"{len(verdicts)} verdicts for {len(self.messages)} messages")
        if strange := {type(verdict) for verdict in verdicts} - _VERDICTS:
            raise StrangeAnswerError(f"a handler must return verdicts, not {strange.pop().__name__}")
        return verdicts


class HungCalls:
    """Calls that are past their deadline, over all leases and all relays of a subscription in this process.

    A slow call cannot be distinguished from one that hangs. Until it comes back, its messages and their keys are held:
    none of them is handled beside it. Its verdicts count while its lease stands, and under the next leases if all of
    them were taken by this process.
    """

    def __init__(self) -> None:
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin with no calls; also in a fork, because the threads of these calls stay with the parent."""
        # Two relays of one name may both be at work for a moment, when one has not noticed yet that its lease is lost.
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._lease: Lease | None = None
        self._incarnation: str | None = None
        #: Outcomes of messages that are not settled; of late calls, and of a connection that was lost.
        self.known = KnownOutcomes()

    def taken(self, lease: Lease) -> None:
        """Note under which lease messages are handled from now on.

        If another process had a lease since the last one, it may have sent earlier messages of a key again. Then no
        outcome from before counts.
        """
        with self._lock:
            if self._lease is None or not lease.follows(self._lease):
                self._forget_outcomes()
            self._lease = lease

    def read_from(self, incarnation: str) -> None:
        """Note the server's incarnation. After a crash, or a failover, what a handler has stored there may be gone."""
        with self._lock:
            if incarnation != self._incarnation:
                self._forget_outcomes()
            self._incarnation = incarnation

    def _forget_outcomes(self) -> None:
        self.known.clear()
        for call in self._calls:
            call.void = True

    def add(self, call: Call) -> None:
        """Hold the messages of this call, and their keys."""
        with self._lock:
            call.void = call.lease != self._lease
            self._calls.append(call)

    def note(
        self,
        lease: Lease | None,
        done: Iterable[Message],
        parkings: Iterable[tuple[Message, Parking]],
        *,
        parked: bool = False,
    ) -> None:
        """Remember outcomes that were not settled under this lease, unless a newer one was taken already.

        `parked`: the messages were read from where they are parked.
        """
        with self._lock:
            if lease == self._lease:
                self.known.note(done, parkings, parked=parked)

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def unfinished(self) -> list[Call]:
        """The calls that have not come back."""
        return [call for call in self._calls if not call.finished]

    @property
    def ids(self) -> set[int | None]:
        """The log ids of the messages that are held."""
        return {message.id for call in self._calls for message in call.messages}

    @property
    def keys(self) -> set[str | None]:
        """The keys that are held."""
        return {message.key for call in self._calls for message in call.messages if message.key is not None}

    def unanswered(self, messages: Iterable[Message], *, parked: bool) -> set[int | None]:
        """Return the log ids of messages that are held, and of those of these whose outcome is known and not settled.

        `parked`: they were read from where they are parked.
        """
        return self.ids | {id for id, _ in self.known.among(messages, parked=parked)}

    def take_finished(self) -> list[Call]:
        """Return the calls that have come back by now and whose verdicts count; hold no messages of finished calls."""
        with self._lock:
            finished = [call for call in self._calls if call.finished]
            self._calls = [call for call in self._calls if call not in finished]
        return [call for call in finished if not call.void]


class Caller:
    """Performs one call at a time; when one hangs, the next goes to a fresh thread."""

    def __init__(self, handler: Handler, lease: Lease | None = None) -> None:
        """`lease`: the one under which the calls are made."""
        self._handler = handler
        self.lease = lease
        self._queue: SimpleQueue[Call | None] | None = None
        self._last: Call | None = None

    def start(self, messages: Sequence[Message], begin_before: float = math.inf) -> Call:
        """Begin a call and return at once. From the moment `begin_before` on, the handler is not called any more."""
        call = Call(messages, begin_before, self.lease)
        if self._queue is None or (self._last is not None and not self._last.finished):
            self._new_thread()
        assert self._queue is not None
        self._queue.put(call)
        self._last = call
        return call

    def close(self) -> None:
        """End the thread when its call is over, but do not wait for it, because a thread cannot be killed."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None
        self._last = None

    def _new_thread(self) -> None:
        self.close()
        self._queue = SimpleQueue()
        threading.Thread(target=self._work, args=(self._queue,), name="outbox-handler", daemon=True).start()

    def _work(self, queue: SimpleQueue[Call | None]) -> None:
        while (call := queue.get()) is not None:
            call.perform(self._handler)
