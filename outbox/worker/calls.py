"""Calls of a handler: made under a lease, in turn, each on a thread that can be left behind."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from queue import SimpleQueue

from outbox.errors import LeaseLostError
from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Reject, Retry, Unavailable, Verdict
from outbox.runtime.clock import clock
from outbox.runtime.fork import in_child
from outbox.runtime.stop import Stop

Handler = Callable[[Sequence[Message]], Sequence[Verdict]]
_Asked = tuple["Call", Handler]

_VERDICTS: frozenset[type] = frozenset((Done, Retry, Reject, Unavailable))
#: A call hangs when it has not come back after so many deadlines.
_HOPELESS = 3
#: So long a call that has its turn is waited for at once.
_HEAD_START_SECONDS = 0.0001
#: How often to look at a call that waits for its turn while no end of the turns before it is known.
_LOOK_SECONDS = 1.0


class StrangeAnswerError(TypeError):
    """Raised on the handler's thread, when the handler returned anything but a verdict for each message."""


class HeldLease:
    """A lease that a heartbeat renews.

    The deadline counts from before the renewal was sent. So the database gives the lease to no other worker before the
    deadline, however long the network takes.
    """

    def __init__(self, lease: Lease, deadline: float, stop: Stop) -> None:
        """`stop`: asked when a command waits for the lease."""
        self.lease = lease
        self.stop = stop
        #: True when the lease is another worker's.
        self.lost = False
        self._deadline = deadline

    @property
    def until(self) -> float:
        """The moment, by `clock`, until when the lease is still ours."""
        return -math.inf if self.lost else self._deadline

    def require(self, seconds: float) -> bool:
        """Return whether the lease is good for `seconds`; False while a renewal may still come in time.

        Raises:
            LeaseLostError: another worker has the lease, or no renewal came back in time.
        """
        left = self.until - clock()
        if left <= 0:
            raise LeaseLostError(f"the lease of {self.lease.partition.subscription} could not be renewed in time")
        return left > seconds

    def renewed(self, deadline: float) -> None:
        """Note a renewal, after which the lease is ours until this moment."""
        self._deadline = deadline


class Call:
    """One call of a handler: waiting for its turn, under way, or finished.

    A finished call has verdicts, or an error, or was too `late` to be made.
    """

    __slots__ = ("_back", "_began", "_ended", "_held", "_needs", "_until", "_wake", "awaited", "deadline", "error",
                 "finished", "late", "left", "messages", "started", "verdicts")  # fmt: skip

    def __init__(
        self,
        messages: Sequence[Message],
        held: HeldLease | None = None,
        *,
        needs: float = 0.0,
        until: float = math.inf,
        deadline: float = math.inf,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """`held`: the lease has to last for the seconds that the call `needs`. `until`: the call begins before this
        moment, by `clock`, or not at all. `deadline`: how many seconds the call may take from its turn on. `wake`:
        called when an awaited call comes back, and when the turn does not come at once.
        """
        self.messages = messages
        self.deadline = deadline
        self._held = held
        self._needs = needs
        self._until = until
        self._wake = wake
        #: The moment when its turn came, by `time.monotonic`; None while it waits.
        self._began: float | None = None
        #: From when the deadline counts: the beginning of the turn, or of the portion under way.
        self.started: float | None = None
        self._ended: float | None = None
        self._back = threading.Lock()
        self._back.acquire()
        #: True from when a thread may sleep until the call comes back.
        self.awaited = False
        #: True when the handler has come back, or is not called any more.
        self.finished = False
        #: True when its turn came too late, and the handler was not called.
        self.late = False
        #: True when the worker went on without the call.
        self.left = False
        self.verdicts: Sequence[Verdict] | None = None
        self.error: BaseException | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the turn until the call came back, or until now."""
        now = time.monotonic()
        return 0.0 if self._began is None else (self._ended or now) - self._began

    @property
    def due(self) -> float:
        """The moment of the deadline, by `time.monotonic`; infinite before the turn."""
        return math.inf if self.started is None else self.started + self.deadline

    @property
    def over(self) -> bool:
        """True when the call has come back or is past its deadline."""
        return self.finished or time.monotonic() >= self.due

    @property
    def hangs(self) -> bool:
        """True when the call has not come back after three deadlines."""
        started = self.started
        return not self.finished and started is not None and time.monotonic() - started >= _HOPELESS * self.deadline

    @property
    def answers(self) -> list[tuple[Message, Verdict]]:
        """The messages with their verdicts; empty if the handler gave none."""
        return list(zip(self.messages, self.verdicts or (), strict=False))

    def begin(self, *, waited: bool) -> None:
        """Begin the turn. `waited`: the turn did not come at once."""
        self._began = self.started = time.monotonic()
        if waited and self._wake is not None:
            self._wake()

    def perform(self, handler: Handler) -> None:
        """Call the handler, and keep the verdicts or the error."""
        try:
            self._hand_over(handler)
        except BaseException as error:
            # Also SystemExit: it would end only this thread, and then nothing would perform the next call.
            self.error = error
        self._ended = time.monotonic()

    def _hand_over(self, handler: Handler) -> None:
        # Checked here, right before the call: another thread began it, and both may have been suspended since.
        self.late = self._is_late()
        if not self.late:
            self.verdicts = handler(self.messages)

    def _is_late(self) -> bool:
        now = clock()
        return now >= self._until or (self._held is not None and now + self._needs >= self._held.until)

    def leave_behind(self) -> bool:
        """Go on without the call, which is past its deadline; return False if the call has come back meanwhile."""
        self.left = not self.finished
        return self.left

    def finish(self) -> None:
        """Tell the thread that waits that the call has come back."""
        self.finished = True
        self._back.release()
        if self.awaited and self._wake is not None:
            self._wake()

    def wait(self, seconds: float) -> None:
        """Wait for the call to come back, for at most so many seconds."""
        if self._back.acquire(timeout=seconds):
            self._back.release()


def verdicts_of(handler: Handler, messages: Sequence[Message]) -> list[Verdict]:
    """Call a handler, and return its verdicts; raise if the handler returned anything else."""
    answer: object = handler(messages)
    if type(answer) is list and len(answer) == len(messages) and answer.count(DONE) == len(answer):
        return answer
    if not isinstance(answer, Collection):
        raise StrangeAnswerError(f"a handler must return verdicts, not {type(answer).__name__}")
    verdicts = list(answer)
    if len(verdicts) != len(messages):
        raise StrangeAnswerError(f"{len(verdicts)} verdicts for {len(messages)} messages")
    if strange := {type(verdict) for verdict in verdicts} - _VERDICTS:
        raise StrangeAnswerError(f"a handler must return verdicts, not {strange.pop().__name__}")
    return verdicts


class Caller:
    """The only door to one destination, for all partitions and leases of a process.

    Turns are given in the order of asking. A call keeps its turn until it comes back, or until its deadline. Past the
    deadline, the call goes on, on a thread that is left behind, beside the call with the next turn.
    """

    def __init__(self, concurrency: int = 1) -> None:
        """`concurrency`: so many calls may have a turn at once."""
        self.concurrency = concurrency
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin without calls; also in a fork, because the threads of the calls stay with the parent."""
        self._lock = threading.Lock()
        self._waiting: deque[_Asked] = deque()
        self._under_way: list[Call] = []
        #: Calls that lost their turn at their deadline.
        self._overdue: list[Call] = []
        #: The threads that have nothing to do: what they take their next call from; None ends them.
        self._idle: list[SimpleQueue[_Asked | None]] = []

    @property
    def overdue(self) -> list[Call]:
        """The calls past their deadline that have not come back."""
        return [call for call in self._overdue if not call.finished]

    def begin(self, call: Call, handler: Handler) -> None:
        """Have a call made when its turn comes, and return at once."""
        with self._lock:
            self._waiting.append((call, handler))
            try:
                self._give(asking=call)
            except BaseException:
                # There is no thread for it. The one who asked learns that, so the call must not be made later.
                self._take_out(call)
                raise

    def look(self, call: Call) -> float:
        """Give the turns of calls past their deadline to other calls.

        Returns:
            The moment, by `time.monotonic`, when to look again, if `call` has not come back by then.
        """
        if call.started is not None and not call.awaited:
            # Else the handler's thread would get the interpreter only when this thread has nothing more to do. Not in
            # `begin`: an interrupt here has to find the call known to the one who asked.
            call.wait(_HEAD_START_SECONDS)
        call.awaited = True
        with self._lock:
            self._give_if_possible()
            if call.finished:
                return time.monotonic()
            if call.started is not None:
                return call.due
            begun = [each.due for each in self._under_way if each.started is not None]
            return min(begun, default=time.monotonic() + _LOOK_SECONDS)

    def withdraw(self, call: Call) -> bool:
        """Do not make a call that still waits for its turn; return False when the call has begun."""
        with self._lock:
            if not self._take_out(call):
                return False
        call.late = call.finished = True
        return True

    def _take_out(self, call: Call) -> bool:
        asked = [each for each in self._waiting if each[0] is call]
        for each in asked:
            self._waiting.remove(each)
        return bool(asked)

    def close(self) -> None:
        """End the idle threads. Later calls are made on new ones."""
        with self._lock:
            for queue in self._idle:
                queue.put(None)
            self._idle = []

    def _give(self, asking: Call | None = None) -> None:
        """Give free turns to the calls that wait for the longest time; called with the lock. `asking`: asked for just
        now.
        """
        if any(call.over for call in self._under_way):
            self._overdue = [*self.overdue, *(call for call in self._under_way if call.over)]
            self._under_way = [call for call in self._under_way if not call.over]
        while self._waiting and len(self._under_way) < self.concurrency:
            # First the thread, because there may be none: then the call waits on.
            queue = self._idle.pop() if self._idle else self._new_thread()
            call, handler = self._waiting.popleft()
            self._under_way.append(call)
            call.begin(waited=call is not asking)
            queue.put((call, handler))

    def _give_if_possible(self) -> None:
        """Give free turns to calls of others. Without a thread the calls wait, and their askers look again."""
        with suppress(RuntimeError, MemoryError):
            self._give()

    def _new_thread(self) -> SimpleQueue[_Asked | None]:
        queue: SimpleQueue[_Asked | None] = SimpleQueue()
        threading.Thread(target=self._work, args=(queue,), name="outbox-handler", daemon=True).start()
        return queue

    def _work(self, queue: SimpleQueue[_Asked | None]) -> None:
        while (asked := queue.get()) is not None:
            call, handler = asked
            call.perform(handler)
            # First the turn is given back: whoever learns that the call has come back finds this thread free.
            kept = self._give_back(call, queue)
            call.finish()
            if not kept:
                return

    def _give_back(self, call: Call, queue: SimpleQueue[_Asked | None]) -> bool:
        """Give a turn back; return False if the call had lost its turn: another thread is here instead."""
        with self._lock:
            if call not in self._under_way:
                return False
            self._under_way.remove(call)
            self._idle.append(queue)
            self._give_if_possible()
            return True
