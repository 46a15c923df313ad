"""Decisions of people on parked messages, carried out by a lease holder."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from outbox.model.decision import Decision
from outbox.model.lease import Partition
from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.position import Progress
from outbox.runtime.named import named
from outbox.runtime.text import one_line
from outbox.store.database import Channel
from outbox.store.subscriptions.decisions import Decisions
from outbox.store.subscriptions.falling_due import FallingDue
from outbox.store.subscriptions.freed_keys import free_keys
from outbox.store.subscriptions.parked import Parked
from outbox.worker.policy import BEHIND, HandlerPolicy

logger = logging.getLogger("outbox")

#: On so many messages decisions are carried out in one transaction.
MOST = 1_000
#: How often to look whether messages were passed before anybody knew of the decision on them.
_LOOK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """A decision, and the messages on which it was carried out: log ids with their keys."""

    decision: Decision
    messages: Mapping[int, str | None]


class OpenDecisions:
    """The open decisions of people, as the lease holder of one partition carries them out."""

    def __init__(self, channel: Channel, parked: Parked, partition: Partition, *, blocks: bool) -> None:
        """`parked`: of the partition. `blocks`: a dead letter holds its key."""
        self._channel = channel
        self._decisions = Decisions(channel, parked.subscription)
        self._falling_due = FallingDue(channel, parked.subscription)
        self._parked = parked
        self._partition = partition
        self._blocks = blocks
        #: The decisions on messages that no worker had read, by their id; and of which message, by log id.
        self._waiting: dict[int, Decision] = {}
        self._unread: dict[int, tuple[UUID, Decision]] = {}
        self._met: list[CarriedOut] = []
        #: False before the first look, which misses no decision: messages are read from the log after it.
        self._looked = False
        self._look_at = 0.0

    def open(self) -> list[int]:
        """Return the ids of open decisions to look at; most looks leave out decisions on unread messages."""
        open = self._decisions.open()
        if self._waiting:
            self._wait_for({id: each for id, each in self._waiting.items() if id in open})
            if time.monotonic() < self._look_at:
                return [id for id in open if id not in self._waiting]
        return open

    def carry_out(
        self,
        open: Sequence[int],
        progress: Progress | None = None,
        *,
        waits: bool = True,
        last: bool = False,
        under_way: Container[int | None] = (),
    ) -> list[CarriedOut]:
        """Carry out open decisions on at most `MOST` parked messages, inside a transaction with the lease held.

        Decisions without any message left are stamped. Messages not parked any more do not count. `progress`: as
        stored of the partition. `waits`: as in `free_keys`. `last`: wait for the holders of other partitions, as
        at the first look.
        `under_way`: messages that are left for later.
        """
        found, room, waiting = list[CarriedOut](), MOST, {**self._waiting}
        waits_here, self._looked = last or not self._looked, True
        for decision in filter(None, (self._decisions.take(id, waits=waits_here) for id in open)):
            unread = self._decisions.unread(decision, progress, self._partition)
            there = self._parked.still(decision.left)
            unread.difference_update(there)
            mine = [id for id in decision.left if id in there and there[id][1] and id not in under_way][:room]
            kept = self._carry_out(decision, mine, waits=waits)
            done = {id: there[id][0] for id in mine if id not in kept}
            left = [id for id in decision.left if (id in there or id in unread) and id not in done]
            if left != decision.left:
                self._decisions.store(decision, left, carried_out=len(done))
            if done:
                found.append(CarriedOut(decision, done))
            waiting.pop(decision.id, None)
            if left and unread.issuperset(left):
                waiting[decision.id] = decision.of(left)
            room -= len(mine)
            if room <= 0:
                break
        self._parked.advance({key for each in found for key in each.messages.values() if key is not None})
        self._wait_for(waiting)
        if not waiting.keys().isdisjoint(open):
            self._look_at = time.monotonic() + _LOOK_SECONDS
        return found

    @property
    def some_unread(self) -> bool:
        """True while there is a decision on a message that no worker has read."""
        return bool(self._unread)

    def on(self, message: Message) -> Decision | None:
        """Return the decision on a message of the log; None: there is none."""
        message_id, decision = self._unread.get(message.id or 0, (None, None))
        # The ids of a log that was truncated are given out again.
        return decision if message_id == message.message_id else None

    def separate(
        self, messages: list[Message], held: Container[str | None], policy: HandlerPolicy
    ) -> tuple[list[Message], list[tuple[Message, Parking]]]:
        """Separate the messages to handle from messages that a person has decided on, and from what is behind these.

        `held`: keys that are held back; their messages are parked in any case.
        """
        if not self.some_unread:
            return messages, []
        free, parkings, behind = list[Message](), list[tuple[Message, Parking]](), set[str]()
        for message in messages:
            decision = self.on(message)
            if message.key in behind:
                parkings.append((message, BEHIND))
            elif decision is None or message.key in held:
                free.append(message)
            else:
                dead = policy.dead(message, why(decision))
                # The next message of the key does not wait for a discard.
                holds = dead.holds and decision.verb == "set_aside"
                parkings.append((message, replace(dead, holds=holds, attempts=0)))
                if holds and message.key is not None:
                    behind.add(message.key)
        return free, parkings

    def meet(self, messages: Sequence[Message]) -> None:
        """Carry out decisions on messages that are parked now, in the open transaction."""
        open = {each.id for each in map(self.on, messages) if each is not None} if self._unread else None
        self._met = self.carry_out(sorted(open), waits=False) if open else []

    def met(self) -> list[CarriedOut]:
        """Return what the last `meet` has carried out, once; called after the commit."""
        met, self._met = self._met, []
        return met

    def _wait_for(self, waiting: dict[int, Decision]) -> None:
        if waiting != self._waiting:
            self._waiting, self._unread = waiting, {}
            for decision in waiting.values():
                message_ids = decision.message_ids
                self._unread |= {id: (message_ids[id], decision) for id in decision.left}

    def _carry_out(self, decision: Decision, ids: Sequence[int], *, waits: bool) -> Collection[int]:
        """Carry out a decision on messages; return the ids of messages left for later."""
        left = set[int]()
        if not ids:
            return left
        if decision.verb == "discard":
            left = free_keys(self._channel, self._parked.subscription, ids, waits=waits)
            self._parked.remove([id for id in ids if id not in left])
        elif decision.verb == "set_aside":
            self._parked.set_aside(ids, why(decision), holds=self._blocks)
        else:
            self._parked.replay(ids)
            if self._parked.ordered:
                self._falling_due.join(ids)
        return left


def why(decision: Decision) -> str:
    """Return a decision as the error of its messages."""
    reason = "" if decision.reason is None else f": {one_line(decision.reason)}"
    return f"{decision.verb.replace('_', ' ')} by {one_line(decision.by)}{reason}"


def log_carried_out(carried_out: Iterable[CarriedOut]) -> None:
    """Log decisions, a line for each message; called after the commit."""
    for each in carried_out:
        decision = each.decision
        reason = "" if decision.reason is None else f" ({one_line(decision.reason)})"
        for id in each.messages:
            about = named(decision.verb, subscription=decision.subscription or "", id=id)
            verb = decision.verb.replace("_", " ")
            logger.info("parked message %d: %s by %s%s", id, verb, one_line(decision.by), reason, extra=about)
