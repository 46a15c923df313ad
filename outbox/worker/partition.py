"""The work for one partition while its lease holds: fetch, handle, settle."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from outbox.errors import HungHandlerError, LeaseLostError
from outbox.model.barrier import has_arrived
from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.position import Progress
from outbox.store.database import Channel
from outbox.store.half_messages.op import DecidedHalves
from outbox.store.log.cursor import Batch, Reading
from outbox.store.log.grace import Grace
from outbox.store.log.log import Log
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.telemetry.events import BatchRead, Teller
from outbox.worker import upkeep
from outbox.worker.assigned import Assigned
from outbox.worker.care import Care, needs_care
from outbox.worker.deciding import Deciding
from outbox.worker.decisions import OpenDecisions
from outbox.worker.fetch import Prefetcher
from outbox.worker.holds import Holds
from outbox.worker.hung import HungCalls
from outbox.worker.maintenance import Maintenance, Task, tasks_of
from outbox.worker.outcome import Finished, Outcome
from outbox.worker.parked import ParkedQueue
from outbox.worker.policy import BEHIND, DELAYED, EXPIRED, MAX_WAITING, HandlerPolicy, newest, with_one_head
from outbox.worker.settings import Settings
from outbox.worker.settle import Parkings, Settlement, Unsettled
from outbox.worker.waiting import SOON_SECONDS, Look, Wait


@dataclass(slots=True)
class _Handled:
    """Handled batches that are not settled: up to which progress, and when to settle."""

    end: Progress | None = None
    done: list[Message] = field(default_factory=list)
    bytes: int = 0
    settle_at: float = math.inf

    def add(self, end: Progress, done: list[Message], size: int, settle_at: float) -> None:
        """Add a batch, of `size` bytes."""
        self.end, self.settle_at = end, min(self.settle_at, settle_at)
        self.done += done
        self.bytes += size


@dataclass(slots=True)
class _Stored:
    """The progress in the database, since when, and up to where rows without messages for us were passed since then."""

    progress: Progress
    at: float = field(default_factory=time.monotonic)
    passed: Progress | None = None


class Handling(Protocol):
    """What a partition needs of a `BatchHandler`."""

    policy: HandlerPolicy
    hung: HungCalls

    @property
    def gave_up(self) -> bool:
        """True when only a new process helps."""

    @property
    def stops(self) -> bool:
        """True when a stop is asked."""

    def run(
        self, messages: list[Message], *, quota: int, parked: bool = False, now: datetime | None = None
    ) -> Generator[Wait | Look | Outcome, None, None]:
        """Yield the outcomes of a batch, part by part."""

    def late(self) -> Iterable[Outcome]:
        """Yield the outcomes of late answers."""

    def keep(self, done: Sequence[Message], parkings: Parkings) -> None:
        """Remember outcomes that are not settled."""


class PartitionWorker:
    """Runs fetch, handle, settle for one partition while its lease holds.

    Made when the lease is taken, dropped when the lease or the connection is lost.
    """

    @classmethod
    def of(cls, assigned: Assigned, batch_handler: Handling, tasks: Iterable[Task]) -> PartitionWorker:
        """Return the work for a partition. `tasks`: of the maintenance, beside those of every lease holder."""
        channel, subscription, settings = assigned.channel, assigned.subscription, assigned.settings
        own = tasks_of(channel, assigned.partition, brief=assigned.until != "stopped")
        reading = Reading(
            log=Log(assigned.limits, subscription.selection, assigned.partition),
            grace=Grace(subscription.grace, settings.poll) if subscription.grace else None,
            stop=subscription.stop_at,
            ends=subscription.kind == "backfill",
        )
        return cls(
            channel,
            assigned.held.lease,
            reading,
            batch_handler,
            replace(settings, limits=assigned.limits),
            finished=DecidedHalves(channel) if subscription.kind == "check" else None,
            unsettled=assigned.unsettled,
            teller=assigned.teller.of_partition(assigned.partition.partition),
            tasks=[*tasks, *own],
        )

    def __init__(
        self,
        channel: Channel,
        lease: Lease,
        reading: Reading,
        batch_handler: Handling,
        settings: Settings,
        *,
        teller: Teller,
        finished: Finished | None = None,
        unsettled: Unsettled | None = None,
        tasks: Iterable[Task] = (),
    ) -> None:
        """`finished`: knows which messages are done already. `unsettled`: the writes that failed before. `tasks`: of
        the maintenance.
        """
        self._batch_handler = batch_handler
        capture = reading.log.now(channel)
        incarnation = capture.incarnation
        batch_handler.hung.read_from(incarnation)
        newest = ProgressLog(channel).newest(lease.partition)
        if newest is None:
            raise LeaseLostError(f"subscription {lease.partition.subscription!r} was dropped")
        policy, name = batch_handler.policy, lease.partition.subscription
        parked = Parked(channel, name, lease.partition, ordered=policy.ordered, compact=policy.compact)
        blocks = policy.ordered and policy.block_on_dead
        decisions = OpenDecisions(channel, parked, lease.partition, blocks=blocks)
        self._settlement = settlement = Settlement(
            channel, lease, incarnation, unsettled, parked=parked, decisions=decisions
        )
        self._settlement.highest = reading.log.last(channel) if newest.highest is None else newest.highest
        self._settlement.rehearse(newest.progress)
        self._hung = hung = batch_handler.hung
        alone = settings.limits.rows if needs_care(newest, hung.earlier) else hung.care_left
        self._care = care = Care(policy, hung.begun, alone)
        self._holds = holds = Holds(parked, upkeep.MOST_KEYS, policy.paused)
        self._deciding = Deciding(decisions, settlement, holds, hung.known, policy)
        self._parked_queue = ParkedQueue(
            parked, settlement, hung, settings, teller, finished, policy=policy, holds=holds, care=care
        )
        self._prefetcher = Prefetcher(channel, reading.after(newest.progress, incarnation))
        self._finished = finished
        self._compact, self._waits_for_grace = policy.compact, reading.grace is not None
        self._teller = teller
        self._stored, self._stop, self._ends = _Stored(newest.progress), reading.stop, reading.ends
        self._handled, self._decide_at = _Handled(), 0.0
        #: What came of the batch that is being handled, as far as it is not settled.
        self._outcome = Outcome()
        self._settings = settings
        self._maintenance = Maintenance(channel.database, tasks, teller)

    def close(self) -> None:
        """End the reading thread, and keep the outcomes that are not settled for the next lease."""
        self._prefetcher.close()
        self._care.end()
        self._hung.care_left = self._care.in_log
        self._batch_handler.keep(self._handled.done + self._outcome.done, self._outcome.parked)

    @property
    def arrived(self) -> bool:
        """True when the partition stands where all partitions meet, and handles nothing more.

        A partition that ends there handles its parked messages before.
        """
        if self._stop is None or not has_arrived(self._stored.progress, self._stop):
            return False
        return not (self._ends and self._parked_queue.some)

    @property
    def alone(self) -> bool:
        """True while messages are handled one by one, because a message may have ended a process."""
        return self._care.goes_on

    @property
    def due_in(self) -> float:
        """Seconds until messages are due that are parked, wait for their grace, or are not settled; or maintenance."""
        settle_in = max(0.0, self._handled.settle_at - time.monotonic())
        return min(self._parked_queue.due_in, self._prefetcher.due_in, self._maintenance.due_in, settle_in)

    def awaits_grace(self) -> bool:
        """Return whether messages from before the first step still wait for their grace; called after an idle step.

        Likewise messages that wait until another partition has handled its own alone.
        """
        return self._care.awaits_turn or any(self._left(batch.messages) for batch in self._prefetcher.young())

    def step(self, *, postpone: bool = False) -> Generator[Wait, None, int]:
        """Handle parked messages that are due, and the next batch of the log; return the number of rows seen.

        `postpone`: a few messages may be settled a moment later, together with the following ones.
        """
        if self._batch_handler.gave_up:
            raise HungHandlerError("calls of the handler never came back; the process has to be restarted")
        if self._handled.settle_at <= time.monotonic():
            self.settle_handled()
        worked = (yield from self._handle_parked()) if self._parked_queue.due_in <= 0 else False
        if self._parked_queue.suspended or self._batch_handler.stops:
            return int(worked)
        batch = self._prefetcher.read()
        self._settlement.highest = max(self._settlement.highest or 0, batch.highest)
        if batch.end.target is not None:
            # A window is open, so there is more: the server reads it while we handle this batch.
            self._prefetcher.read_ahead()
        if batch.messages:
            self._teller.tell(BatchRead, messages=batch.messages, now=batch.now)
            yield from self._handle(batch, postpone=postpone and batch.end.target is None)
        else:
            if not (batch.seen or self._waits_for_grace):
                self._care.log_ends()
            self._store_in_passing(batch)
        self._maintenance.step(self._stored.progress.base, behind=batch.end.target is not None)
        return worked + batch.seen

    def _handle_parked(self) -> Generator[Wait, None, bool]:
        """Handle parked messages that are due, and decisions of people; return whether there were any."""
        self._parked_queue.begin(self._batch_handler.late())
        messages = self._parked_queue.take(decided=self._deciding.carry_out(self._stored.progress))
        if messages is not None:
            with closing(self._batch_handler.run(messages, quota=0, parked=True)) as handling:
                for each in handling:
                    if isinstance(each, Wait):
                        yield from self._waited(each)
                    elif isinstance(each, Outcome):
                        self._parked_queue.settle(each)
        return self._parked_queue.end()

    def _waited(self, wait: Wait) -> Generator[Wait, None, None]:
        """Wait. Handled messages are settled in a long wait, because an outage may take hours.

        For the same reason decisions of people are carried out.
        """
        if wait.calls:
            yield wait.at_most(SOON_SECONDS)
        if not wait.over:
            self.settle_handled()
            if not wait.calls and time.monotonic() >= self._decide_at:
                self.decide()
            yield wait

    def decide(self, *, last: bool = False) -> None:
        """Carry out decisions of people, at any point. `last`: nobody may work under the next lease for a while."""
        if self._deciding.carry_out(self._stored.progress, self._parked_queue.under_way, last=last):
            self._parked_queue.look_soon()
        self._decide_at = time.monotonic() + upkeep.DECISIONS

    def settle_handled(self) -> None:
        """Settle the handled messages that are not settled yet."""
        if self._handled.end is not None:
            self._store(self._handled.end)

    def settle_all(self) -> None:
        """Settle the handled messages, or store how far rows were passed, so that the next turn goes on from there."""
        for outcome in self._batch_handler.late():
            self._parked_queue.settle(outcome)
        self.settle_handled()
        # Perhaps people have paused the subscription since, and nobody will work before the resume.
        self.decide(last=True)
        if self._stored.passed is not None:
            self._store(self._stored.passed)
        elif self._settlement.only_begun and not self._care.in_log:
            # It tells the next process that this one ended in order, without messages that may end a process.
            self._store(self._stored.progress)

    def tidy(self) -> None:
        """Go on with the maintenance that has more to do, for a bounded time, and not after a stop."""
        for _ in range(upkeep.LAST_PORTIONS):
            if self._batch_handler.stops or not self._maintenance.go_on(self._stored.progress.base):
                return

    def _handle(self, batch: Batch, *, postpone: bool) -> Generator[Wait, None, None]:
        messages = self._left(batch.messages)
        if not messages:
            self._store_in_passing(batch)
            return
        to_send, parkings = self._sort_out(messages, batch.now)
        recalled = self._settlement.recalled(to_send)
        to_send, parkings = recalled.free, parkings + [(message, DELAYED) for message in recalled.open]
        if self._care.in_log and to_send:
            self._park_alone(batch, to_send, parkings)
            return
        unsent = {message.id for message, _ in parkings}
        to_send, replaced = newest(to_send) if self._compact else (to_send, [])
        before, most = self._handled, self._settings.limits
        size = sum(len(message.body) for message in to_send) if before.end or postpone else 0
        if len(before.done) + len(to_send) > most.rows or before.bytes + size > most.bytes:
            # A crash must never repeat more than one batch.
            self.settle_handled()
        settle_at = time.monotonic() + self._settings.settle_within.total_seconds()
        self._outcome = outcome = Outcome(parked=parkings)
        if to_send:
            outcome = yield from self._hand_over(to_send, batch)
        if outcome.open:
            # Without the replaced messages: they are not handled before the newest of their key is.
            self._settle_partly(batch, outcome.open, unsent)
        elif postpone and not self._outcome.parked and time.monotonic() < settle_at:
            self._handled.add(batch.end, self._outcome.done + replaced, size, settle_at)
        else:
            self._outcome.done += replaced
            self._store(batch.end, self._outcome)
        self._outcome = Outcome()

    def _park_alone(self, batch: Batch, to_send: list[Message], parkings: Parkings) -> None:
        """Park the messages that are to be handled alone; what is left of the batch is read again."""
        self.settle_handled()
        alone = self._care.park(to_send, self._settlement.lease.partition.subscription)
        outcome = Outcome(parked=[*parkings, *alone])
        if len(alone) == len(to_send):
            self._store(batch.end, outcome)
            return
        last = alone[-1][0].id or 0
        self._store(batch.upto(last), _split(outcome, last)[0])
        self._prefetcher.forget().move_to(self._stored.progress)

    def _hand_over(self, to_send: list[Message], batch: Batch) -> Generator[Wait, None, Outcome]:
        """Call the handler, settle in parts if a call takes long, and return the last part."""
        outcome = Outcome()
        quota = self._parked_queue.quota(MAX_WAITING)
        with closing(self._batch_handler.run(to_send, quota=quota, now=batch.now)) as handling:
            for each in handling:
                if isinstance(each, Wait):
                    yield from self._waited(each)
                    if not each.calls and (left := self._left_by_people(to_send)):
                        return Outcome(open=left)
                elif isinstance(each, Look):
                    each.others = self._more_available()
                else:
                    outcome = each
                    self._parked_queue.note(outcome.refused, outcome.accepted_topics)
                    self._outcome.done += outcome.done
                    self._outcome.parked += outcome.parked
                    if outcome.next is not None:
                        self._settle_before(outcome.next, batch)
        return outcome

    def _left_by_people(self, to_send: Sequence[Message]) -> list[Message]:
        """Return the messages of a batch without an outcome, if people have decided on one: the batch is read again."""
        settled = {message.id for message in self._outcome.done} | {message.id for message, _ in self._outcome.parked}
        left = [message for message in to_send if message.id not in settled]
        return left if self._deciding.some_on(left) else []

    def _left(self, messages: list[Message]) -> list[Message]:
        """Return the messages that are not done already; called late, because messages become done at any moment."""
        if self._finished is None or not messages:
            return messages
        done = self._finished.finished(messages)
        return [message for message in messages if message.id not in done] if done else messages

    def _more_available(self) -> bool:
        """Return whether other messages could be tried: later ones of the log, or parked messages."""
        return self._parked_queue.due_in <= 0 or self._prefetcher.more()

    def _sort_out(self, messages: list[Message], now: datetime) -> tuple[list[Message], Parkings]:
        """Separate the messages to be handled from messages to be parked at once."""
        policy, holds, refused = self._batch_handler.policy, self._holds, self._parked_queue.paused()
        held, called = holds.among(messages), self._hung.held(ordered=policy.ordered)
        messages, decided = self._deciding.sort_out(messages, held)
        parkings: Parkings = []
        timed = [m for m in messages if m.deliver_at is not None or m.expires_at is not None]
        if held or called or timed:
            known = self._hung.known.ids(timed)
            messages, parkings = policy.sort_out(messages, now, held=held, called=called, known=known)
        if refused:
            messages, waiting = policy.without_refused(messages, refused, self._parked_queue.quota(MAX_WAITING))
            parkings += waiting
        return messages, parkings + decided

    def _store(self, end: Progress, outcome: Outcome | None = None) -> None:
        """Store an outcome, and progress behind all batches that were handled before."""
        began, outcome = time.monotonic(), outcome or Outcome()
        self._settlement.settle(end, outcome.parked)
        parkings = outcome.parked
        done = self._handled.done + outcome.done if self._handled.done else outcome.done
        self._hung.known.settled(done, outcome.parked)
        self._handled, self._stored = _Handled(), _Stored(end)
        if parkings:
            self._parked_queue.parked(parkings)
            parkings = self._deciding.without_discarded(parkings)
        self._teller.tell_settled(done, parkings, self._stored.at - began)

    def _settle_before(self, next: Message, batch: Batch) -> None:
        """Settle the messages before `next`, which is not handled yet, while the batch goes on."""
        last = (next.id or 0) - 1
        settled, left = _split(self._outcome, last)
        if settled.done or settled.parked:
            self._store(batch.upto(last), settled)
            self._outcome = left

    def _settle_partly(self, batch: Batch, open: list[Message], unsent: Container[int | None]) -> None:
        """Settle a batch that ends early up to the last handled message; park the open messages before.

        `unsent`: messages that the handler did not get.
        """
        self.settle_handled()
        tried = [m for m, parking in self._outcome.parked if parking not in (BEHIND, EXPIRED) and m.id not in unsent]
        handled = [m.id or 0 for m in (*self._outcome.done, *tried)]
        if handled:
            last = max(handled)
            why = "left unsent when later messages were settled"
            waiting = [(m, self._batch_handler.policy.waiting(m, why)) for m in open if (m.id or 0) < last]
            self._outcome.parked += with_one_head(waiting)
            self._store(batch.upto(last), _split(self._outcome, last)[0])
        # The other open messages will be read again from the stored progress.
        self._prefetcher.forget().move_to(self._stored.progress)

    def _store_in_passing(self, batch: Batch) -> None:
        """Store the progress of a batch without messages for us, only once in a while to save writes."""
        self._stored.passed = batch.end if batch.seen else self._stored.passed
        moved = batch.end != self._stored.progress
        every = upkeep.STORE_PASSED if self._stored.passed else upkeep.STORE_IDLE if moved else upkeep.STORE_SAME
        arrives = moved and self._stop is not None and has_arrived(batch.end, self._stop)
        if time.monotonic() - self._stored.at >= every or arrives:
            self._store(batch.end)
            if not batch.seen:
                self._prefetcher.forget().move_to(batch.end)


def _split(outcome: Outcome, upto: float) -> tuple[Outcome, Outcome]:
    """Return the outcomes up to a log id, and those after."""
    before, after = Outcome(), Outcome()
    for message in outcome.done:
        (before if (message.id or 0) <= upto else after).done.append(message)
    for message, parking in outcome.parked:
        (before if (message.id or 0) <= upto else after).parked.append((message, parking))
    return before, after
