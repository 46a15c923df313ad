"""Calls past their deadline: their messages are held until the calls come back, and late answers may count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outbox.model.lease import Lease, Partition
from outbox.model.message import Message
from outbox.model.parking import Held, Parking
from outbox.model.slots import slot_of
from outbox.model.verdict import Done, Reject
from outbox.runtime.fork import in_child
from outbox.worker.calls import Call
from outbox.worker.known import KnownOutcomes
from outbox.worker.policy import HandlerPolicy


@dataclass(eq=False, slots=True)
class HungCall:
    """A call past its deadline.

    `void`: the verdicts do not count, because another process may have handled the messages. `blamed`: an attempt was
    counted meanwhile.
    """

    call: Call
    void: bool = False
    blamed: bool = False

    @property
    def alone(self) -> Message | None:
        """The only message of the call, if no attempt was counted yet."""
        return self.call.messages[0] if len(self.call.messages) == 1 and not self.blamed else None


class HungCalls:
    """Calls past their deadline, over all leases of a partition in this process.

    A slow call cannot be distinguished from a call that hangs. Until a call comes back, its messages and keys are held:
    none is handled beside the call. Verdicts count while the lease of the call stands, and under the next leases if
    this process took them all.
    """

    def __init__(self, earlier: Iterable[Call] = ()) -> None:
        """`earlier`: calls for other partitions, whose keys may be here by now. Their answers do not count."""
        #: True when no message is handled beside an earlier message of its key.
        self.ordered = True
        #: Makes the dead letter of a rejected message.
        self.dead: Callable[[Message, str], Parking] = HandlerPolicy().dead
        self._reset()
        self._calls.extend(HungCall(call, void=True, blamed=True) for call in earlier)
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin with no calls; also in a fork, because the threads of the calls stay with the parent."""
        # Two relays of one name may both work for a moment, when one has not noticed yet that its lease is lost.
        self._lock = threading.Lock()
        self._calls: list[HungCall] = []
        self._lease: Lease | None = None
        self._incarnation: str | None = None
        #: Outcomes of messages that are not settled; of late calls, and of a connection that was lost.
        self.known = KnownOutcomes()

    def taken(self, lease: Lease) -> None:
        """Note under which lease messages are handled from now on.

        After a lease of another process no earlier outcome counts: messages of a key may have been sent again.
        """
        with self._lock:
            if self._lease is None or not lease.follows(self._lease):
                self._forget_outcomes()
            self._lease = lease

    def read_from(self, incarnation: str) -> None:
        """Note the server's incarnation. After a crash, or a failover, rows of a handler may be gone."""
        with self._lock:
            if incarnation != self._incarnation:
                self._forget_outcomes()
            self._incarnation = incarnation

    def _forget_outcomes(self) -> None:
        self.known.clear()
        for hung in self._calls:
            hung.void = True

    def add(self, call: Call, lease: Lease | None = None, *, blamed: bool = False) -> None:
        """Hold the messages of a call, and their keys. `lease`: under which the call was made. `blamed`: an attempt is
        counted already.
        """
        with self._lock:
            self._calls.append(HungCall(call, void=lease != self._lease, blamed=blamed))

    def note(
        self,
        lease: Lease | None,
        done: Iterable[Message],
        parkings: Iterable[tuple[Message, Parking]],
        *,
        parked: bool = False,
    ) -> None:
        """Remember outcomes that were not settled under a lease, unless a newer lease was taken already."""
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
        """The log ids of the held messages."""
        return {message.id for hung in self._calls for message in hung.call.messages}

    @property
    def keys(self) -> set[str | None]:
        """The held keys."""
        if not self.ordered:
            return set()
        return {message.key for hung in self._calls for message in hung.call.messages if message.key is not None}

    def held(self) -> Held:
        """Return which parked messages are not to be tried, because calls have them.

        A message alone in a call that hangs is left out, because an attempt may have to be counted.
        """
        for hung in self.take_finished():
            answers = hung.call.answers
            done = [message for message, verdict in answers if isinstance(verdict, Done)]
            dead = [(message, self.dead(message, v.error)) for message, v in answers if isinstance(v, Reject)]
            self.known.note(done, dead)
        alone = {hung.alone.id for hung in self.unfinished if hung.alone is not None}
        return Held(ids=self.ids - alone, keys=self.keys, but=alone)

    def unanswered(self, messages: Iterable[Message], *, parked: bool) -> set[int | None]:
        """Return the log ids of messages that may have arrived: a call has them, or the outcome is not settled."""
        return self.ids | {id for id, _ in self.known.among(messages, parked=parked)}

    def take_finished(self) -> list[HungCall]:
        """Return the finished calls whose verdicts count; hold no messages of finished calls."""
        with self._lock:
            finished = [hung for hung in self._calls if hung.call.finished]
            self._calls = [hung for hung in self._calls if hung not in finished]
        return [hung for hung in finished if not hung.void]


def hung_calls_of(all: dict[Partition, HungCalls], partition: Partition, slots: int) -> HungCalls:
    """Return the hung calls of a partition, with calls of earlier generations whose keys are here by now.

    `all`: the hung calls of one process. Earlier generations without any are dropped.
    """
    if partition in all:
        return all[partition]
    calls: dict[Call, None] = {}
    for each, hung_calls in list(all.items()):
        if each.subscription == partition.subscription and each.generation != partition.generation:
            unfinished = hung_calls.unfinished
            calls |= dict.fromkeys(hung.call for hung in unfinished)
            if not unfinished:
                all.pop(each, None)

    def may_be_here(message: Message) -> bool:
        # A message without a key may be of any partition.
        return message.key is None or partition.owns(slot_of(message.key, slots))

    return all.setdefault(partition, HungCalls(call for call in calls if any(map(may_be_here, call.messages))))
