"""The turn of a partition among the others of a worker: when its next step is due, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Protocol

from outbox.errors import HungHandlerError, LeaseLostError
from outbox.model.pausing import Pauses
from outbox.model.subscription import Subscription
from outbox.runtime.stop import Stop
from outbox.store.dialects.dialect import Hint
from outbox.worker import upkeep
from outbox.worker.assigned import Assigned
from outbox.worker.calls import HeldLease
from outbox.worker.hung import HungCalls
from outbox.worker.polling import Polling
from outbox.worker.settings import Until
from outbox.worker.waiting import Wait

_NOW = Wait(0.0)


class Steps(Protocol):
    """The work that takes turns: `PartitionWorker`, which says more."""

    @property
    def arrived(self) -> bool:
        """True when the partition stands where all partitions meet."""

    @property
    def due_in(self) -> float:
        """Seconds until there is work to do."""

    @property
    def alone(self) -> bool:
        """True while messages are handled one by one."""

    def awaits_grace(self) -> bool:
        """Return whether messages still wait for their grace."""

    def step(self, *, postpone: bool) -> Generator[Wait, None, int]:
        """Handle what is due, and the next batch; return how much was seen."""

    def decide(self) -> None:
        """Carry out decisions of people, also in the midst of a step."""

    def settle_all(self) -> None:
        """Store everything that was handled or passed, and is not stored yet."""

    def tidy(self) -> None:
        """Delete rows that are no longer needed, at the end of a run that does not go on."""

    def close(self) -> None:
        """End the work at any point."""


class Turn:
    """One partition at work, and its wait."""

    def __init__(
        self,
        held: HeldLease,
        work: Steps,
        hung: HungCalls,
        polling: Polling,
        *,
        until: Until,
        hears: bool,
        began_under: Pauses = (),
    ) -> None:
        """`hung`: calls for this partition past the deadline. `hears`: looks for more when a hint comes.

        `began_under`: what people held back at the beginning, which counts until the end.
        """
        self.held = held
        self.began_under = began_under
        self.wait = _NOW
        #: True between two steps. `pauses`: the step under way waits for its destination, and not for a call alone.
        self.between, self.pauses = True, False
        #: While no step is taken, although there may be work to do: ends the turn.
        self._stands: Stop | None = None
        #: True at the end, if `until` is reached.
        self.finished = False
        self._work = work
        self._hung = hung
        self._polling = polling
        self._until = until
        self._hears = hears
        self._steps = self._all_steps()

    @classmethod
    def of(cls, assigned: Assigned, work: Steps) -> Turn:
        """Return the turn of a partition."""
        subscription, poll = assigned.subscription, assigned.settings.poll
        return cls(
            assigned.held,
            work,
            assigned.hung,
            Polling(*(pause.total_seconds() for pause in poll)),
            until=assigned.until,
            hears=not subscription.grace,
            began_under=subscription.pauses,
        )

    def step(self) -> bool:
        """Go on until the next wait; return False at the end, when all handled messages are settled."""
        if self._stands is not None and not self._stands.asked:
            self._work.decide()
            self.wait = Wait(time.monotonic() + upkeep.DECISIONS, stop=self._stands)
            return True
        try:
            self.wait = next(self._steps)
        except StopIteration:
            return False
        self.pauses = not self.between and (self.pauses or not self.wait.calls)
        return True

    @property
    def arrived(self) -> bool:
        """True when the partition stands where all partitions meet."""
        return self._work.arrived

    @property
    def hangs(self) -> bool:
        """True while a call for the partition hangs."""
        return any(call.hangs for call in self._hung.unfinished)

    @property
    def due(self) -> bool:
        """True when there is work to do. Under a lost lease, a step under way still waits for its call."""
        return self.wait.over or (self.between and self.held.lost)

    @property
    def idle(self) -> bool:
        """True while nothing has come, and a hint would cause a look."""
        return self.between and self._hears and self._stands is None and not self.wait.over

    def hinted(self, hint: Hint) -> None:
        """Look for more at once, because messages may have come."""
        self._polling.hinted(hint.pause)
        self.wait = _NOW

    def follow(self, stored: Subscription, stop: Stop) -> None:
        """Follow what people hold back now: end, if that was not so at the beginning, with everything settled.

        So a turn never has to ask whether a message may be handed over. While a call hangs, the turn keeps the lease,
        because another worker would send the messages beside the call; if all is paused, the turn takes no step until
        the end of the pause, or until the worker is asked to `stop`, but carries out decisions of people.
        """
        hangs = bool(self._hung.unfinished)
        stands = stop if hangs and stored.is_paused else None
        if stands is not self._stands:
            self._stands, self.wait = stands, _NOW
        if not hangs and (stored.is_paused or self.began_under != stored.pauses):
            self.held.stop.ask()

    def close(self) -> None:
        """End the turn at any point; keep the outcomes that are not settled for the next lease."""
        self._steps.close()
        self._work.close()

    def _all_steps(self) -> Generator[Wait, None, None]:
        while not self._ends():
            self.between = False
            found = yield from self._work.step(postpone=self._until == "stopped" and self._polling.many)
            self.between = True
            if self._until == "stopped":
                yield self._look_again(found)
            elif found and (self._until == "empty" or self._work.alone):
                yield _NOW
            elif self._awaits_calls() or (not found and self._work.awaits_grace()):
                yield self._pause(self._work.due_in)
            elif not self.held.stop.asked:
                self.finished = True
                break
        self._work.settle_all()
        if self.finished:
            self._work.tidy()

    def _look_again(self, found: int) -> Wait:
        """Return how long to wait for a hint: for a short time at first, for longer when nothing comes."""
        if found:
            self._polling.came(found)
            return _NOW
        return self._pause(min(self._polling.pause(), self._work.due_in))

    def _pause(self, seconds: float) -> Wait:
        return Wait(time.monotonic() + seconds, tuple(self._hung.unfinished), self.held.stop)

    def _awaits_calls(self) -> bool:
        """Return whether calls past the deadline may soon be settled.

        Raises:
            HungHandlerError: everything else is handled, and a call hangs.
        """
        if self._until == "empty" and self.hangs:
            raise HungHandlerError("a call of the handler never came back; what it has is held until the process ends")
        return bool(self._hung) and not self.hangs

    def _ends(self) -> bool:
        """Return whether the worker stops, or the lease is given back, also because all partitions meet.

        While a call of the handler hangs, the lease is kept: a command would change rows beside the call.
        """
        if self.held.lost:
            raise LeaseLostError(f"{self.held.lease.partition.subscription}: another worker has the lease now")
        if self._hung.unfinished:
            # Forgotten, until it is asked again, unless the worker stops.
            self.held.stop.withdraw()
            return self.held.stop.asked
        return self.held.stop.asked or self._work.arrived
