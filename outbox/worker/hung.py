"""Calls past their deadline: keys are held until the calls come back, and late answers may count."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from outbox.model.lease import Lease, Partition
from outbox.model.message import Message
from outbox.model.parking import NOTHING_HELD, Held, Parking
from outbox.model.slots import slot_of
from outbox.model.verdict import Done, Reject
from outbox.runtime.fork import in_child
from outbox.worker.calls import Call
from outbox.worker.known import KnownOutcomes
from outbox.worker.policy import HandlerPolicy


class HungCalls:
    """Calls past the deadline, over all leases of a partition in this process.

    A slow call cannot be distinguished from a call that hangs. Until an answer is settled, nothing of the keys of the
    call is handed over. While the lease of the call stands, the answer settles the parked rows of the messages. Under
    the next leases, if this process took all of them, accepted messages are known. Any other answer is dropped.
    """

    def __init__(self, earlier: Iterable[Call] = ()) -> None:
        """`earlier`: calls for other partitions, with keys that may be here by now. The answers are dropped."""
        self._reset()
        self._calls.update(dict.fromkeys(earlier))
        in_child(self._reset)

    def _reset(self) -> None:
        """Begin with no calls; also in a fork, because the threads of the calls stay with the parent."""
        # Two relays of one name may both work for a moment, when one has not noticed yet that its lease is lost.
        self._lock = threading.Lock()
        #: By call, the lease of the call; None: the answer is dropped.
        self._calls: dict[Call, Lease | None] = {}
        self._lease: Lease | None = None
        #: The epochs of this process before the present one.
        self.earlier = set[int]()
        #: The log ids of messages that this process has begun to handle alone; and how many messages of the log were
        #: still to be handled alone at the end of the last lease. See `care`.
        self.begun = set[int | None]()
        self.care_left = 0
        self._incarnation: str | None = None
        #: Outcomes that are not settled: of late calls, and of a connection that was lost.
        self.known = KnownOutcomes()

    def taken(self, lease: Lease) -> None:
        """Note under which lease messages are handled from now on.

        After a lease of another process no earlier outcome counts: messages of a key may have been sent again.
        """
        with self._lock:
            if self._lease is None or not lease.follows(self._lease):
                self._forget_outcomes()
            if self._lease is not None:
                self.earlier.add(self._lease.epoch)
            self._lease = lease

    def read_from(self, incarnation: str) -> None:
        """Note the server's incarnation. After a crash, or a failover, rows of a handler may be gone."""
        with self._lock:
            if incarnation != self._incarnation:
                self._forget_outcomes()
            self._incarnation = incarnation

    def _forget_outcomes(self) -> None:
        self.known.clear()
        self._calls = dict.fromkeys(self._calls)

    def add(self, call: Call, lease: Lease | None = None) -> None:
        """Hold the keys of a call. `lease`: under which the call was made."""
        with self._lock:
            self._calls[call] = lease if lease == self._lease else None

    def note(self, lease: Lease, done: Iterable[Message], parkings: Iterable[tuple[Message, Parking]] = ()) -> None:
        """Remember outcomes that were not settled under a lease, unless a newer lease was taken already."""
        with self._lock:
            if lease == self._lease:
                self.known.note(done, parkings)

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def unfinished(self) -> list[Call]:
        """The calls still under way."""
        return [call for call in list(self._calls) if not call.finished]

    def held(self, *, ordered: bool) -> Held:
        """Return the messages and keys of the calls. `ordered`: keys have an order."""
        if not self._calls:
            return NOTHING_HELD
        messages = [message for call in list(self._calls) for message in call.messages]
        keys = {message.key for message in messages if ordered and message.key is not None}
        return Held(ids={message.id for message in messages if message.key not in keys}, keys=keys)

    def come_back(self, lease: Lease, policy: HandlerPolicy) -> list[Call]:
        """Return the finished calls of a lease, with answers to be settled.

        Finished calls of other leases are dropped; what was accepted or rejected is known, if the answer counts.
        """
        with self._lock:
            if lease != self._lease:
                return []
            back = [call for call in self._calls if call.finished]
            for call in back:
                if self._calls[call] != lease and self._calls.pop(call) is not None:
                    self.known.note(*_outcomes(call, policy))
            return [call for call in back if call in self._calls]

    def settled(self, call: Call) -> None:
        """Hold the keys of a call no longer."""
        with self._lock:
            self._calls.pop(call, None)


def _outcomes(call: Call, policy: HandlerPolicy) -> tuple[list[Message], list[tuple[Message, Parking]]]:
    """Return the done messages of a call, and the dead letters, of which the first failure of a key may be one."""
    done, dead, failed = list[Message](), list[tuple[Message, Parking]](), set[str | None]()
    for message, verdict in call.answers:
        if isinstance(verdict, Done):
            done.append(message)
        elif message.key not in failed:
            failed |= {message.key} if policy.ordered and message.key is not None else set()
            dead += [(message, policy.dead(message, verdict.error))] if isinstance(verdict, Reject) else []
    return done, dead


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
            calls |= dict.fromkeys(unfinished)
            if not unfinished:
                all.pop(each, None)

    def may_be_here(message: Message) -> bool:
        # A message without a key may be of any partition.
        return message.key is None or partition.owns(slot_of(message.key, slots))

    return all.setdefault(partition, HungCalls(call for call in calls if any(map(may_be_here, call.messages))))
