"""Calls of a handler, each on a thread that can be left behind, and the caller through which all of them are made."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.verdict import Done, Reject, Retry, Unavailable, Verdict, describe
from outbox.runtime.clock import clock
from outbox.runtime.fork import in_child
from outbox.telemetry.teller import Teller

Handler = Callable[[Sequence[Message]], Sequence[Verdict]]
_Asked = tuple["Call", Handler]

_VERDICTS: frozenset[type] = frozenset((Done, Retry, Reject, Unavailable))
#: A call hangs when it has not come back after so many deadlines.
_HOPELESS = 3
#: How often to look at a call that waits for its turn while no end of the turns before it is known.
_LOOK_SECONDS = 1.0


class StrangeAnswerError(TypeError):
    """Raised on the handler's thread, when the handler returned something else than a verdict for each message."""


class Right(Protocol):
    """The right to call a handler, which may be prolonged while a call waits for its turn: a lease, say."""

    @property
    def until(self) -> float:
        """The moment, by `clock`, when the right ends."""


class LeaseRight(Right, Protocol):
    """The right of a lease that is renewed."""

    @property
    def lease(self) -> Lease | None:
        """The lease; None if there is no database."""

    def require(self, seconds: float) -> bool:
        """Return whether it lasts for so long; False while a renewal may come in time.

        Raises:
            LeaseLostError: it has gone to another worker, or no renewal came in time.
        """


class Alarm(Protocol):
    """Wakes the thread that waits for a call."""

    def set(self) -> None:
        """Wake it. Takes no lock that others hold for long."""


class Call:
    """One call of a handler: it waits for its turn, is under way, or is finished.

    A finished call has verdicts, or an error, or was too `late` to be made.
    """

    __slots__ = ("_ended", "_needs", "_right", "_teller", "_wake", "deadline", "error", "finished", "late",
                 "messages", "started", "verdicts")  # fmt: skip

    def __init__(
        self,
        messages: Sequence[Message],
        right: Right | None = None,
        *,
        needs: float = 0.0,
        deadline: float = math.inf,
        wake: Alarm | None = None,
        teller: Teller | None = None,
    ) -> None:
        """`right`: the handler is called only while this right lasts for the seconds that the call `needs`; None: it
        is called at any time. `deadline`: how many seconds the call may take from its turn on. `wake`: set when the
        call comes back, and when its turn comes later than it was asked for. `teller`: tells that it has come back.
        """
        self.messages = messages
        self.deadline = deadline
        self._right = right
        self._needs = needs
        self._wake = wake
        self._teller = teller
        #: The moment when its turn came, by `time.monotonic`; None while it waits.
        self.started: float | None = None
        self._ended: float | None = None
        #: True when the handler has come back, or is not called any more.
        self.finished = False
        #: True when its turn came too late, and the handler was not called.
        self.late = False
        self.verdicts: Sequence[Verdict] | None = None
        self.error: BaseException | None = None

    @property
    def seconds(self) -> float:
        """Seconds from its turn until it came back, or until now."""
        now = time.monotonic()
        return 0.0 if self.started is None else (self._ended or now) - self.started

    @property
    def due(self) -> float:
        """The moment of its deadline, by `time.monotonic`; infinite before its turn."""
        return math.inf if self.started is None else self.started + self.deadline

    @property
    def over(self) -> bool:
        """True when it has come back or is past its deadline."""
        return self.finished or time.monotonic() >= self.due

    @property
    def hangs(self) -> bool:
        """True when it has not come back after three deadlines."""
        return not self.finished and self.seconds >= _HOPELESS * self.deadline

    @property
    def answers(self) -> list[tuple[Message, Verdict]]:
        """The messages with their verdicts; empty if the handler gave none."""
        return list(zip(self.messages, self.verdicts or (), strict=False))

    def begin(self, *, waited: bool) -> None:
        """Begin its turn. `waited`: the turn was not given to it at once."""
        self.started = time.monotonic()
        if waited and self._wake is not None:
            self._wake.set()

    def perform(self, handler: Handler) -> None:
        """Call the handler, and keep its verdicts or its error."""
        try:
            # Checked here, right before the call: another thread began it, and both may have been suspended since.
            self.late = self._right is not None and clock() + self._needs >= self._right.until
            if not self.late:
                self.verdicts = self._checked(handler(self.messages))
        except BaseException as error:
            # Also SystemExit: it would end only this thread, and then nothing would perform the next call.
            self.error = error
        self._ended = time.monotonic()
        if self._teller is not None and not self.late:
            error_text = None if self.error is None else describe(self.error)
            self._teller.handed_over(self.messages, self.verdicts, error_text, self.seconds)

    def finish(self) -> None:
        """Let the one who waits for it know that it has come back."""
        self.finished = True
        if self._wake is not None:
            self._wake.set()

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


class Caller:
    """The only door to one handler, for all partitions and leases of a process that use it.

    Turns are given in the order in which they are asked for. A call keeps its turn until it comes back, or until its
    deadline: a call past its deadline goes on, on a thread that is left behind, beside the call that has the next turn.
    """

    def __init__(self, handler: Handler, *, concurrency: int = 1, beside: Caller | None = None) -> None:
        """`concurrency`: so many calls may have a turn at once. `beside`: another caller of the same destination, with
        which this one shares its turns.
        """
        self._handler = handler
        self._turns: _Turns = _Turns(concurrency) if beside is None else beside._turns

    @property
    def overdue(self) -> list[Call]:
        """The calls that are past their deadline and have not come back."""
        return self._turns.still_overdue

    def begin(self, call: Call) -> None:
        """Have a call made when its turn comes, and return at once."""
        self._turns.ask(call, self._handler)

    def look(self, call: Call) -> float:
        """Give the turns of calls that are past their deadline to others.

        Returns:
            The moment, by `time.monotonic`, when to look again, if `call` has not come back by then.
        """
        return self._turns.look(call)

    def withdraw(self, call: Call) -> bool:
        """Make this call not at all, if it still waits for its turn; return False when it has begun."""
        return self._turns.withdraw(call)

    def close(self) -> None:
        """End the threads that have nothing to do. Later calls are made on others."""
        self._turns.end_idle_threads()


class _Turns:
    """The turns at one destination: who has one, who waits for one, and the threads on which calls are made."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin without calls; also in a fork, because the threads of these calls stay with the parent."""
        self._lock = threading.Lock()
        self._waiting: deque[_Asked] = deque()
        self._under_way: list[Call] = []
        #: Calls that lost their turn at their deadline.
        self._overdue: list[Call] = []
        #: The threads that have nothing to do: what they take their next call from; None ends them.
        self._idle: list[SimpleQueue[_Asked | None]] = []

    @property
    def still_overdue(self) -> list[Call]:
        return [call for call in self._overdue if not call.finished]

    def ask(self, call: Call, handler: Handler) -> None:
        asked = (call, handler)
        with self._lock:
            self._waiting.append(asked)
            try:
                self._give(asking=call)
            except BaseException:
                # There is no thread for it. Whoever asked learns that, so it must not be made later.
                if asked in self._waiting:
                    self._waiting.remove(asked)
                raise

    def look(self, call: Call) -> float:
        with self._lock:
            self._give_if_possible()
            if call.started is not None:
                return call.due
            begun = [each.due for each in self._under_way if each.started is not None]
            return min(begun, default=time.monotonic() + _LOOK_SECONDS)

    def withdraw(self, call: Call) -> bool:
        with self._lock:
            asked = next((each for each in self._waiting if each[0] is call), None)
            if asked is None:
                return False
            self._waiting.remove(asked)
        call.late = call.finished = True
        return True

    def end_idle_threads(self) -> None:
        with self._lock:
            for queue in self._idle:
                queue.put(None)
            self._idle = []

    def _give(self, asking: Call | None = None) -> None:
        """Give free turns to the calls that wait for the longest time; called with the lock.

        `asking`: the call that is asked for now.
        """
        if any(call.over for call in self._under_way):
            self._overdue = [*self.still_overdue, *(call for call in self._under_way if call.over)]
            self._under_way = [call for call in self._under_way if not call.over]
        while self._waiting and len(self._under_way) < self._concurrency:
            # First the thread, because there may be none: then the call waits on.
            queue = self._idle.pop() if self._idle else self._new_thread()
            call, handler = self._waiting.popleft()
            self._under_way.append(call)
            call.begin(waited=call is not asking)
            queue.put((call, handler))

    def _give_if_possible(self) -> None:
        """Give free turns to calls of others. Without a thread for them they wait; those who wait look again."""
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
        """Give the turn of a call back; return False if the call had lost it: another thread is here instead."""
        with self._lock:
            if call not in self._under_way:
                return False
            self._under_way.remove(call)
            self._idle.append(queue)
            self._give_if_possible()
            return True


class LeasedCaller:
    """Makes calls under one lease, for one partition."""

    def __init__(
        self, caller: Caller, held: LeaseRight, *, needs: float, deadline: float, wake: Alarm, teller: Teller
    ) -> None:
        """`needs`: for so many seconds the lease has to last when a call begins. `deadline`: of a call, in seconds.

        `wake`: wakes the thread that steps the partition. `teller`: tells of its calls.
        """
        self._caller = caller
        self._held = held
        self._needs = needs
        self._deadline = deadline
        self._wake = wake
        self._teller = teller

    @property
    def lease(self) -> Lease | None:
        """The lease under which the calls are made."""
        return self._held.lease

    @property
    def overdue(self) -> list[Call]:
        """The calls of the handler, under any lease, that are past their deadline and have not come back."""
        return self._caller.overdue

    def may_begin(self) -> bool:
        """Return whether the lease lasts long enough for a call; False while a renewal may come in time.

        Raises:
            LeaseLostError: no renewal came in time.
        """
        return self._held.require(self._needs)

    def begin(self, messages: Sequence[Message]) -> Call:
        """Have the handler called with these messages when the turn comes, and return at once."""
        call = Call(
            messages, self._held, needs=self._needs, deadline=self._deadline, wake=self._wake, teller=self._teller
        )
        self._caller.begin(call)
        return call

    def look(self, call: Call) -> float:
        """Return when to look again at this call, as `Caller.look` does."""
        return self._caller.look(call)

    def withdraw(self, call: Call) -> bool:
        """Make this call not at all, if it still waits for its turn; return False when it has begun."""
        return self._caller.withdraw(call)
