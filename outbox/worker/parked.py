"""Parked messages: tried again beside the log."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from outbox.model.message import Message
from outbox.model.parking import Held, States
from outbox.store.subscriptions.parked import Parked, Ready
from outbox.telemetry.events import Teller
from outbox.worker import upkeep
from outbox.worker.care import Care
from outbox.worker.holds import Holds
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
#: How often to count how many messages wait.
_COUNT_SECONDS = 5.0
#: How often to look for dead letters that are done by now.
_DONE_SECONDS = 5.0


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
        settlement: Settlement,
        hung: HungCalls,
        settings: Settings,
        teller: Teller,
        finished: Finished | None = None,
        *,
        policy: HandlerPolicy,
        holds: Holds,
        care: Care,
    ) -> None:
        """`hung`: calls past the deadline. `finished`: knows which messages are done already."""
        self._policy = policy
        self._parked = parked
        self._holds = holds
        self._care = care
        self._settlement = settlement
        self._hung = hung
        self._limits = settings.limits
        self._teller = teller
        self._finished = finished
        self._done_at = 0.0
        self._refusals = Refusals()
        self._look_at = 0.0
        #: How many messages wait for their destination, and when they are counted again.
        self._waiting, self._count_at = 0, 0.0
        self._round = _Round()

    @property
    def suspended(self) -> bool:
        """True when everything waits for a message that failed."""
        return self._policy.suspend and self._parked.some_retry(self._holds.paused)

    @property
    def due_in(self) -> float:
        """Seconds until there may be something to do; 0 with a late answer."""
        late = self._hung.come_back(self._settlement.lease, self._policy)
        return 0.0 if late else max(0.0, self._look_at - time.monotonic())

    def parked(self, parkings: Parkings) -> None:
        """Take note of messages of the log that were parked now."""
        self._holds.hold(message.key for message, parking in parkings if parking.holds)
        self._waiting += sum(parking.state == States.WAITING for _, parking in parkings)
        delays = [parking.delay.total_seconds() for _, parking in parkings if parking.delay is not None]
        self._look_at = min(self._look_at, time.monotonic() + min(delays, default=_LOOK_SECONDS))
        # A newer message may stand in place of a dead letter.
        some = {States.DELAYED, States.BEHIND} if self._policy.compact else {States.DELAYED}
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
    def _called(self) -> Held:
        return self._hung.held(ordered=self._parked.ordered)

    @property
    def under_way(self) -> set[int | None]:
        """The log ids of messages that are being handled."""
        return self._round.under_way

    def look_soon(self) -> None:
        """Look at once, because parked messages have changed."""
        self._look_at = 0.0

    @property
    def some(self) -> bool:
        """True while the partition has any parked message."""
        return self._parked.some()

    def quota(self, most: int) -> int:
        """Return how many more messages may wait for their destination."""
        if time.monotonic() >= self._count_at:
            self._waiting = self._parked.waiting(most)
            self._count_at = time.monotonic() + _COUNT_SECONDS
        return max(0, most - self._waiting)

    def begin(self, late: Iterable[Outcome] = ()) -> None:
        """Settle the outcomes of `late` answers."""
        self._round, self._care.awaits_turn = _Round(), False
        for outcome in late:
            self.settle(outcome)

    def take(self, *, decided: bool = False) -> list[Message] | None:
        """Let delayed messages fall due; return the messages to handle, if there are any.

        `decided`: decisions of people have changed parked messages.
        """
        self._round.worked |= decided + self._remove_done() + self._fall_due() > 0
        probed, most = self._refusals.probed(), self._limits
        paused, held, retries = self._refusals.paused(), self._holds.and_paused(self._called), self.suspended
        bytes = 0 if self._care.alone else most.bytes
        ready = self._parked.ready(paused, most.rows, bytes, probed=probed, held=held, retries=retries)
        missed = set(probed).difference(each.message.topic for each in ready)
        self._refusals.missed(missed, nothing_due=not ready)
        ready = self._care.next(ready)
        to_send = self._sorted_out(ready) if ready else None
        self._round.under_way = {message.id for message in to_send or ()}
        return to_send

    def _sorted_out(self, ready: list[Ready]) -> list[Message]:
        """Return the messages to handle. Expired ones, and those done already, are settled with the first part."""
        expired = [each.message for each in ready if each.expired]
        # What was accepted does not expire.
        late = {message.id for message in expired} - self._hung.known.ids(expired)
        to_send = [r.message for r in ready if r.message.id not in late]
        finished = self._finished.finished(to_send) if self._finished is not None and to_send else set()
        self._round.changed = [(r.message, EXPIRED) for r in ready if r.message.id in late]
        self._round.done = [message for message in to_send if message.id in finished]
        to_send = [message for message in to_send if message.id not in finished]
        # A message whose withdrawal is open waits, with what is behind.
        recalled = self._settlement.recalled(to_send, in_order=self._parked.ordered)
        self._round.done += recalled.withdrawn
        return self._alone(ready[0]) if recalled.free and self._care.alone else recalled.free

    def _alone(self, ready: Ready) -> list[Message]:
        """Return a message that is handled alone, parked as under way; an empty list if there is no call now."""
        parking = self._care.begin(ready.message, ready.error)
        if parking is not None and parking.state == States.DEAD:
            self._round.changed.append((ready.message, parking))
            return []
        if parking is not None:
            self._settlement.settle_parked({}, [(ready.message, parking)])
            self._care.began(ready.message)
        return [] if self._care.awaits_turn else [ready.message]

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
            # What waits as before is no reason to look again at once.
            self._round.worked |= bool(done) or any(parking.state != States.WAITING for _, parking in changed)

    def _write(self, done: list[Message], changed: Parkings) -> None:
        began = time.monotonic()
        try:
            self._settlement.settle_parked({message.id or 0: message.key for message in done}, changed)
        except BaseException:
            self._hung.note(self._settlement.lease, done, changed)
            raise
        self._hung.known.settled(done, changed)
        settled = [*done, *(message for message, _ in changed)]
        self._care.settled(settled)
        self._holds.reconsider(message.key for message in settled)
        self._waiting = max(0, self._waiting - len(done))
        # What goes on to wait for its destination is nothing new.
        new = [each for each in changed if each[1].state != States.WAITING]
        self._teller.tell_settled(done, new, time.monotonic() - began)

    def end(self) -> bool:
        """Note when to look again; return whether there was anything to do."""
        self._care.end()
        self._round.under_way.clear()
        self._refusals.note(self._round.refused, self._round.accepted)
        self._renew_errors()
        waits = self._care.awaits_turn
        soon = time.monotonic() + (_TURN_SECONDS if waits else 0.0)
        self._look_at = soon if self._round.worked or waits else self._next_look()
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

    def _remove_done(self) -> int:
        """Remove dead letters that are done by now."""
        if self._finished is None or time.monotonic() < self._done_at:
            return 0
        found = self._finished.dead(self._parked.subscription, _MOST_DONE)
        if found:
            self._settlement.settle_parked(dict(found), [])
            self._holds.reconsider(key for _, key in found)
        self._done_at = 0.0 if len(found) == _MOST_DONE else time.monotonic() + _DONE_SECONDS
        return len(found)

    def _fall_due(self) -> int:
        # Without order a message that falls due stands for itself, and is ready as it is.
        keys = self._settlement.let_fall_due(self._limits.rows) if self._parked.ordered else set[str]()
        self._holds.hold(keys)
        return len(keys)
