"""Parked messages: tried again beside the log, with the decisions of people."""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outbox.model.message import Message
from outbox.model.parking import NOTHING_HELD, Held
from outbox.model.position import Progress
from outbox.store.subscriptions.parked import Parked, Ready
from outbox.telemetry.events import Teller
from outbox.worker import upkeep
from outbox.worker.care import ALONE, is_marked, marked
from outbox.worker.decisions import CarriedOut, OpenDecisions, log_carried_out, why
from outbox.worker.hung import HungCalls
from outbox.worker.outcome import Finished, Outcome
from outbox.worker.policy import BEHIND, EXPIRED, MAX_ERROR, HandlerPolicy
from outbox.worker.refusals import Refusals
from outbox.worker.settings import Settings
from outbox.worker.settle import Parkings, Settlement

#: So many errors are renewed in one transaction, and so many dead letters that are done are removed in one.
_MOST_RENEWED = _MOST_DONE = 1000
#: How often to look for decisions and due messages when none is known to be due sooner.
_LOOK_SECONDS = 1.0
#: How often to look whether another partition of this process still handles a message alone.
_TURN_SECONDS = 0.1
#: How often to look for dead letters that are done by now.
_DONE_SECONDS = 5.0


class Holds:
    """The held units: stored among parked messages, called by a hanging call, or paused by a person.

    The units are in memory, because only the lease holder changes parked rows.
    """

    def __init__(
        self, parked: Parked, most: int, paused: Collection[str | None] = (), hung: HungCalls | None = None
    ) -> None:
        """`most`: so many keys are kept in memory; if there are more, the database is asked. `paused`: keys that are
        held by order of a person. `hung`: calls past the deadline.
        """
        self._parked = parked
        self._most = most
        self._hung = hung
        self.paused = frozenset(key for key in paused if key is not None)
        keys = parked.keys(most)
        self._keys: set[str] | None = None if keys is None else keys | self.paused

    @property
    def called(self) -> Held:
        """The units of hanging calls."""
        return NOTHING_HELD if self._hung is None else self._hung.held(ordered=self._parked.ordered)

    @property
    def untried(self) -> Held:
        """The units without a try for parked messages: paused or called."""
        called = self.called
        return replace(called, keys={*called.keys, *self.paused}) if self.paused else called

    def among(self, messages: Sequence[Message]) -> Collection[str | None]:
        """Return the stored and paused keys, at least among the keys of these messages."""
        if self._keys is not None:
            return self._keys
        return self.paused | self._parked.held_among({m.key for m in messages if m.key is not None})

    def hold(self, keys: Iterable[str | None]) -> None:
        """Hold keys from now on."""
        if self._keys is not None:
            self._keys.update(key for key in keys if key is not None)
            if len(self._keys) > self._most:
                self._keys = None

    def reconsider(self, keys: Collection[str]) -> None:
        """Ask the database which keys are still held, after messages were done, discarded or replayed."""
        if keys and self._keys is not None:
            self._keys.difference_update(keys)
            self.hold(self._parked.held_among(keys) | self.paused.intersection(keys))


@dataclass(slots=True)
class _Round:
    """From `begin` to `end`: outcomes for the next settle, and topics that were accepted or not."""

    worked: bool = False
    #: Log ids of messages that are being handled.
    under_way: set[int | None] = field(default_factory=set)
    done: list[Message] = field(default_factory=list)
    changed: Parkings = field(default_factory=list)
    accepted: set[str] = field(default_factory=set)
    refused: dict[str, str | None] = field(default_factory=dict)


class ParkedQueue:
    """The parked messages of one partition. Between `begin` and `end` the ready ones are handled."""

    def __init__(
        self,
        parked: Parked,
        decisions: OpenDecisions,
        settlement: Settlement,
        hung: HungCalls,
        settings: Settings,
        teller: Teller,
        finished: Finished | None = None,
        *,
        policy: HandlerPolicy,
        careful: bool = False,
    ) -> None:
        """`hung`: calls past the deadline. `finished`: knows which messages are done already. `careful`: the
        messages that are ready at first are handled one by one.
        """
        self._policy = policy
        #: So many messages are handled one by one; None: not known before the first look.
        self._careful: int | None = None if careful else 0
        #: True while messages are handled one by one. `awaits_turn`: another partition of this process does so now.
        self.alone = self.awaits_turn = False
        self._parked = parked
        self._decisions = decisions
        self._settlement = settlement
        self._hung = hung
        self._limits = settings.limits
        self._teller = teller
        self._finished = finished
        self._done_at = 0.0
        self.holds = Holds(parked, upkeep.MOST_KEYS, policy.paused, hung)
        self._refusals = Refusals()
        self._look_at = 0.0
        #: Whether messages may wait for their destination, with or without keys.
        self._some_wait = True
        self._round = _Round()

    @property
    def suspended(self) -> bool:
        """True when everything waits for a message that failed."""
        return self._policy.suspend and self._parked.some_retry(self.holds.paused)

    @property
    def due_in(self) -> float:
        """Seconds until there may be something to do; 0 with a late answer."""
        late = self._hung.come_back(self._settlement.lease, self._policy)
        return 0.0 if late else max(0.0, self._look_at - time.monotonic())

    def parked(self, parkings: Parkings) -> None:
        """Take note of messages of the log that were parked now."""
        self.holds.hold(message.key for message, parking in parkings if parking.holds)
        self._some_wait = self._some_wait or any(parking.state == "waiting" for _, parking in parkings)
        delays = [parking.delay.total_seconds() for _, parking in parkings if parking.delay is not None]
        self._look_at = min(self._look_at, time.monotonic() + min(delays, default=_LOOK_SECONDS))
        # A newer message may stand in place of a dead letter.
        some = {"delayed", "behind"} if self._policy.compact else {"delayed"}
        if any(parking.state in some for _, parking in parkings):
            self._look_at = 0.0

    def note(self, refused: Mapping[str, str | None], accepted: Collection[str]) -> None:
        """Note which topics of the log were refused, and which were accepted."""
        self._refusals.note(refused, accepted)
        following = self._refusals.next()
        self._look_at = self._look_at if following is None else min(self._look_at, following)

    def paused(self) -> Mapping[str, str]:
        """Return the topics of which no message is handed over now, with the last error."""
        return self._refusals.paused()

    @property
    def some(self) -> bool:
        """True while the partition has any parked message."""
        return self._parked.some()

    def quota(self, most: int) -> int:
        """Return how many more messages may wait for their destination."""
        if not self._some_wait:
            return most
        waiting = self._parked.waiting(most)
        self._some_wait = waiting > 0
        return most - waiting

    def begin(self, late: Iterable[Outcome] = (), *, progress: Progress | None = None) -> list[Message] | None:
        """Settle the outcomes of `late` answers, carry out decisions, and let delayed messages fall due.

        Return the messages to handle, if there are any. `progress`: as it is stored.
        """
        self._round, self.awaits_turn = _Round(), False
        for outcome in late:
            self.settle(outcome)
        self._round.worked |= self.decide(progress) + self._remove_done() + self._fall_due() > 0
        probed, most = self._refusals.probed(), self._limits
        paused, held, retries = self._refusals.paused(), self.holds.untried, self.suspended
        bytes = 0 if self.alone else most.bytes
        ready = self._parked.ready(paused, most.rows, bytes, probed=probed, held=held, retries=retries)
        missed = set(probed).difference(each.message.topic for each in ready)
        self._refusals.missed(missed, nothing_due=not ready)
        ready = self._one_by_one(ready)
        to_send = self._sorted_out(ready) if ready else None
        self._round.under_way = {message.id for message in to_send or ()}
        return to_send

    def handle_alone(self, number: int) -> None:
        """Handle so many messages more one by one: only heads keep the mark that they wait for that."""
        self._careful = (self._careful or 0) + number

    def _one_by_one(self, ready: list[Ready]) -> list[Ready]:
        """Return the ready messages; only the first, while messages are handled alone."""
        careful = len(ready) if self._careful is None else self._careful
        self.alone = bool(ready) and (careful > 0 or any(is_marked(each.error) for each in ready))
        self._careful = max(0, careful - 1) if self.alone else 0
        return ready[:1] if self.alone else ready

    def _sorted_out(self, ready: list[Ready]) -> list[Message]:
        """Return the messages to handle. Expired ones, and those done already, are settled with the first part."""
        expired = [each.message for each in ready if each.expired]
        # What was accepted does not expire.
        late = {message.id for message in expired} - self._hung.known.ids(expired)
        to_send = [r.message for r in ready if r.message.id not in late]
        finished = self._finished.finished(to_send) if self._finished is not None and to_send else set()
        self._round.changed = [(r.message, EXPIRED) for r in ready if r.message.id in late]
        self._round.done = [message for message in to_send if message.id in finished]
        to_send = self._not_withdrawn([message for message in to_send if message.id not in finished])
        return to_send if not (to_send and self.alone) else self._marked(ready[0])

    def _not_withdrawn(self, messages: list[Message]) -> list[Message]:
        """Return the messages that are not withdrawn. A message whose withdrawal is open is left out, with its key."""
        delayed = [message for message in messages if message.deliver_at is not None]
        if not delayed:
            return messages
        recalled = self._settlement.recalled(delayed)
        self._round.done += [message for message in delayed if message.message_id in recalled.withdrawn]
        left, waiting = list[Message](), set[str]()
        for message in messages:
            if message.message_id in recalled.open and self._parked.ordered and message.key is not None:
                waiting.add(message.key)
            elif message.message_id not in recalled.withdrawn | recalled.open and message.key not in waiting:
                left.append(message)
        return left

    def _marked(self, ready: Ready) -> list[Message]:
        """Mark a message before its call; return an empty list if the message becomes a dead letter instead.

        Also while another partition of this process handles a message alone.
        """
        self.awaits_turn = not ALONE.taken(self)
        if self.awaits_turn:
            return []
        if ready.message.id not in self._hung.marked:
            parking = marked(ready.message, ready.error, self._policy)
            if parking.state == "dead":
                self._round.changed.append((ready.message, parking))
                return []
            self._settlement.settle_parked({}, [(ready.message, parking)])
            self._hung.marked.add(ready.message.id)
        return [ready.message]

    def settle(self, outcome: Outcome) -> None:
        """Write a part of the outcome."""
        done, changed = self._round.done + outcome.done, self._round.changed
        # What is behind another message of its key is parked so already.
        changed += [each for each in outcome.parked if each[1] is not BEHIND]
        self._round.accepted |= {message.topic for message in outcome.done}
        self._round.refused |= outcome.refused
        self._round.done, self._round.changed = [], []
        if done or changed:
            self._write(done, changed)
            self._round.worked = True

    def _write(self, done: list[Message], changed: Parkings) -> None:
        began = time.monotonic()
        try:
            self._settlement.settle_parked({message.id or 0: message.key for message in done}, changed)
        except BaseException:
            self._hung.note(self._settlement.lease, done, changed)
            raise
        settled = [*done, *(message for message, _ in changed)]
        self._hung.known.settled(settled)
        self._hung.marked.difference_update(message.id for message in settled)
        self.holds.reconsider({message.key for message in settled if message.key is not None})
        # What goes on to wait for its destination is nothing new.
        new = [each for each in changed if each[1].state != "waiting"]
        self._teller.tell_settled(done, new, time.monotonic() - began)

    def close(self) -> None:
        """End at any point."""
        ALONE.give_back(self)

    def end(self) -> bool:
        """Note when to look again; return whether there was anything to do."""
        ALONE.give_back(self)
        self._round.under_way.clear()
        self._refusals.note(self._round.refused, self._round.accepted)
        self._renew_errors()
        soon = time.monotonic() + (_TURN_SECONDS if self.awaits_turn else 0.0)
        self._look_at = soon if self._round.worked or self.awaits_turn else self._next_look()
        return self._round.worked

    def _renew_errors(self) -> None:
        """Store why the messages of refused topics wait now; a portion in a transaction.

        While a call hangs, its messages, and those of their keys, wait for another reason.
        """
        if self._hung:
            return
        for topic, error in self._refusals.to_store(self._round.refused):
            renewed = _MOST_RENEWED
            while renewed == _MOST_RENEWED:
                with self._settlement.held():
                    renewed = self._parked.renew_error(topic, error[:MAX_ERROR], _MOST_RENEWED)
            self._refusals.stored(topic, time.monotonic() + upkeep.RENEW_ERRORS)

    def _next_look(self) -> float:
        """Return the moment when a message falls due, or a topic may be tried again.

        Messages that are due, and could not be handled, count for nothing: they wait for a change.
        """
        now, due = time.monotonic(), self._parked.next_due()
        moments = [now + _LOOK_SECONDS, self._refusals.next(), None if due is None else now + max(0.02, due)]
        return min(each for each in moments if each is not None)

    def some_decided(self, messages: Iterable[Message]) -> bool:
        """Return whether a person has decided on one of these messages of the log."""
        return self._decisions.some_unread and any(self._decisions.on(message) is not None for message in messages)

    def without_decided(self, messages: list[Message], held: Container[str | None]) -> tuple[list[Message], Parkings]:
        """Separate the messages to handle from messages that a person has decided on, and from what is behind these.

        `held`: keys that are held back; their messages are parked in any case.
        """
        if not self._decisions.some_unread:
            return messages, []
        free, parkings, behind = list[Message](), Parkings(), set[str]()
        for message in messages:
            decision = self._decisions.on(message)
            if message.key in behind:
                parkings.append((message, BEHIND))
            elif decision is None or message.key in held:
                free.append(message)
            else:
                dead = self._policy.dead(message, why(decision))
                # The next message of the key does not wait for a discard.
                holds = dead.holds and decision.verb == "set_aside"
                parkings.append((message, replace(dead, holds=holds, attempts=0)))
                if holds and message.key is not None:
                    behind.add(message.key)
        return free, parkings

    def without_discarded(self, parkings: Parkings) -> Parkings:
        """Take note of decisions on messages that were parked now; return the parkings without the discarded ones."""
        carried_out = self._decisions.met()
        if carried_out:
            self._note(carried_out)
        gone = {id for each in carried_out if each.decision.verb == "discard" for id in each.messages}
        return [each for each in parkings if each[0].id not in gone] if gone else parkings

    def _note(self, carried_out: Sequence[CarriedOut]) -> None:
        log_carried_out(carried_out)
        self.holds.reconsider({key for each in carried_out for key in each.messages.values() if key is not None})

    def decide(self, progress: Progress | None) -> bool:
        """Carry out decisions of people, also between `begin` and `end`; return whether there may be more to do.

        Decisions on messages that are being handled wait for the `end`. `progress`: as it is stored.
        """
        open = self._decisions.open()
        if not open:
            return False
        with self._settlement.held():
            # A writer must not hold up the partition for as long as its transaction takes.
            carried_out = self._decisions.carry_out(open, progress, waits=False, under_way=self._round.under_way)
            # Before the commit, because the answer to the commit may be lost as well.
            self._hung.known.forget({id for each in carried_out for id in each.messages})
        self._note(carried_out)
        self._look_at = 0.0 if carried_out else self._look_at
        # A later decision may have replaced an open decision meanwhile.
        return bool(carried_out) or not {*self._decisions.open()} <= {*open}

    def _remove_done(self) -> int:
        """Remove dead letters that are done by now."""
        if self._finished is None or time.monotonic() < self._done_at:
            return 0
        found = self._finished.dead(self._parked.subscription, _MOST_DONE)
        if found:
            self._settlement.settle_parked(dict(found), [])
            self.holds.reconsider({key for _, key in found if key is not None})
        self._done_at = 0.0 if len(found) == _MOST_DONE else time.monotonic() + _DONE_SECONDS
        return len(found)

    def _fall_due(self) -> int:
        if not (self._parked.ordered and self._parked.some_fell_due()):
            # Without order a message that falls due stands for itself, and is ready as it is.
            return 0
        with self._settlement.held():
            keys = self._parked.fall_due(self._limits.rows)
        self.holds.hold(keys)
        return len(keys)
