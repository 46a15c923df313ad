"""Calls that are past their deadline: what they have is held until they come back, and their answers may count late."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.parking import Held, Parking
from outbox.model.verdict import Done
from outbox.runtime.fork import in_child
from outbox.worker.calls import Call
from outbox.worker.known import KnownOutcomes


@dataclass(eq=False, slots=True)
class HungCall:
    """A call past its deadline, and the lease under which it was made.

    `void`: its verdicts do not count, because others may have handled its messages since. `blamed`: an attempt of its
    message was counted while it hung.
    """

    call: Call
    lease: Lease | None = None
    void: bool = False
    blamed: bool = False

    @property
    def alone(self) -> Message | None:
        """The message of the call if it has only one and no attempt was counted for it yet."""
        return self.call.messages[0] if len(self.call.messages) == 1 and not self.blamed else None


class HungCalls:
    """Calls that are past their deadline, over all leases and all relays of a subscription in this process.

    A slow call cannot be distinguished from one that hangs. Until it comes back, its messages and their keys are held:
    none of them is handled beside it. Its verdicts count while its lease stands, and under the next leases if all of
    them were taken by this process.
    """

    def __init__(self, earlier: Iterable[Call] = ()) -> None:
        """`earlier`: calls for other partitions, whose keys may be of this one by now. Their answers do not count."""
        self._reset()
        self._calls.extend(HungCall(call, void=True, blamed=True) for call in earlier)
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin with no calls; also in a fork, because the threads of these calls stay with the parent."""
        # Two relays of one name may both be at work for a moment, when one has not noticed yet that its lease is lost.
        self._lock = threading.Lock()
        self._calls: list[HungCall] = []
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
        for hung in self._calls:
            hung.void = True

    def add(self, call: Call, lease: Lease | None = None) -> None:
        """Hold the messages of this call, and their keys. `lease`: the one under which it was made."""
        with self._lock:
            self._calls.append(HungCall(call, lease, void=lease != self._lease))

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
    def unfinished(self) -> list[HungCall]:
        """The calls that have not come back."""
        return [hung for hung in self._calls if not hung.call.finished]

    @property
    def ids(self) -> set[int | None]:
        """The log ids of the messages that are held."""
        return {message.id for hung in self._calls for message in hung.call.messages}

    @property
    def keys(self) -> set[str | None]:
        """The keys that are held."""
        return {message.key for hung in self._calls for message in hung.call.messages if message.key is not None}

    def held(self) -> Held:
        """Return which parked messages are not to be tried, because they are in these calls.

        A message that hangs alone in its call is not among them, because an attempt of it may have to be counted.
        """
        for hung in self.take_finished():
            self.known.note(message for message, verdict in hung.call.answers if isinstance(verdict, Done))
        alone = {hung.alone.id for hung in self.unfinished if hung.alone is not None}
        return Held(ids=self.ids - alone, keys=self.keys, but=alone)

    def unanswered(self, messages: Iterable[Message], *, parked: bool) -> set[int | None]:
        """Return the log ids of messages that are held, and of those of these whose outcome is known and not settled.

        `parked`: they were read from where they are parked.
        """
        return self.ids | {id for id, _ in self.known.among(messages, parked=parked)}

    def take_finished(self) -> list[HungCall]:
        """Return the calls that have come back by now and whose verdicts count; hold no messages of finished calls."""
        with self._lock:
            finished = [hung for hung in self._calls if hung.call.finished]
            self._calls = [hung for hung in self._calls if hung not in finished]
        return [hung for hung in finished if not hung.void]
