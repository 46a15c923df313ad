"""A worker's time with a partition: fetch, handle, settle, until the lease or the connection is lost."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator
from contextlib import closing
from datetime import datetime
from typing import TypeVar, cast

from outbox.errors import HungHandlerError, LeaseLostError
from outbox.model.barrier import has_arrived
from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.position import Progress
from outbox.store.database import Channel
from outbox.store.log.cursor import Batch, Reading
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.telemetry.teller import PartitionTeller
from outbox.worker.done_already import Finished
from outbox.worker.fetch import Prefetcher
from outbox.worker.handle import BatchHandler, Look
from outbox.worker.maintenance import Maintenance
from outbox.worker.outcome import Outcome
from outbox.worker.parked import ParkedQueue
from outbox.worker.policy import BLOCKED, DELAYED, EXPIRED, sort_out
from outbox.worker.settings import Settings
from outbox.worker.settle import Parkings, Settlement, Unsettled
from outbox.worker.waiting import SOON_SECONDS, Wait

logger = logging.getLogger("outbox")


T = TypeVar("T")


class PartitionWorker:
    """Runs fetch, handle, settle for one partition while its lease holds.

    Made when the lease is taken, dropped when the lease or the connection is lost.
    """

    def __init__(
        self,
        channel: Channel,
        lease: Lease,
        reading: Reading,
        batch_handler: BatchHandler,
        settings: Settings,
        *,
        teller: PartitionTeller,
        finished: Finished | None = None,
        unsettled: Unsettled | None = None,
    ) -> None:
        """`finished`: knows which messages are done already. `unsettled`: what the worker could not write before."""
        self._channel = channel
        self._lease = lease
        self._batch_handler = batch_handler
        self._incarnation = reading.log.now(channel).incarnation
        batch_handler.read_from(self._incarnation)
        newest = ProgressLog(channel).newest(lease.partition)
        if newest is None:
            raise LeaseLostError(f"subscription {lease.partition.subscription!r} was dropped")
        self._settlement = Settlement(channel, lease, self._incarnation, unsettled)
        self._settlement.rehearse(newest.progress)
        parked = Parked(channel, lease.partition.subscription, lease.partition)
        self._parked_queue = ParkedQueue(parked, self._settlement, batch_handler, settings, teller, finished)
        self._prefetcher = Prefetcher(channel, reading.after(newest.progress))
        self._finished = finished
        self._teller = teller
        self._stored, self._stop = newest.progress, reading.stop
        self._passed = False
        self._stored_at = time.monotonic()
        #: Batches that were handled and are not settled: up to which progress, their messages, and how large.
        #: `_settle_at`: when to settle them.
        self._handled: Progress | None = None
        self._handled_messages: list[Message] = []
        self._handled_bytes = 0
        self._settle_at = math.inf
        #: What came of the batch that is being handled, as far as it is not settled.
        self._outcome = Outcome()
        self._limits = settings.limits
        self._upkeep = settings.upkeep
        self._settle_within = settings.settle_within.total_seconds()
        self._maintenance = Maintenance(channel, lease, self._settlement, finished, settings.upkeep, teller)

    def close(self) -> None:
        """End the thread that reads ahead, and keep the outcomes that are not settled for the next lease."""
        self._prefetcher.close()
        self._batch_handler.keep(self._handled_messages + self._outcome.done, self._outcome.parked, parked=False)

    @property
    def arrived(self) -> bool:
        """True when the partition stands where all of them meet, and handles nothing more."""
        return self._stop is not None and has_arrived(self._stored, self._stop)

    @property
    def due_in(self) -> float:
        """Seconds until something is due for messages that are parked, wait for their grace, or are not settled."""
        return min(self._parked_queue.due_in, self._prefetcher.due_in, max(0.0, self._settle_at - time.monotonic()))

    def awaits_grace(self) -> bool:
        """Return whether messages from before the first step still wait for their grace; called after an idle step."""
        return any(self._left(batch.messages) for batch in self._prefetcher.young())

    def step(self, *, postpone: bool = False) -> Generator[Wait, None, int]:
        """Handle parked messages that are due, and the next batch of the log; return the number of rows seen.

        `postpone`: a few messages may be settled a moment later, together with those that follow.
        """
        if self._batch_handler.gave_up:
            raise HungHandlerError("calls of the handler never came back; the process has to be restarted")
        if self._settle_at <= time.monotonic():
            self.settle_handled()
        worked = yield from self._meanwhile(self._parked_queue.step())
        batch = self._prefetcher.read()
        if batch.incarnation not in (None, self._incarnation):
            raise LeaseLostError("the server was restarted: positions in memory are void")
        if batch.end.target is not None:
            # A window is open, so there is more: the server reads it while we handle this batch.
            self._prefetcher.read_ahead()
        if batch.messages:
            self._teller.batch_read(batch.messages, batch.now)
            yield from self._handle(batch, postpone=postpone and batch.end.target is None)
        else:
            self._store_in_passing(batch)
        self._maintenance.step(self._stored.base)
        return int(worked) + batch.seen

    def _meanwhile(self, steps: Generator[Wait, None, T]) -> Generator[Wait, None, T]:
        """Run `steps`, and settle what was handled before while they wait; return what they return."""
        with closing(steps):
            while True:
                try:
                    wait = next(steps)
                except StopIteration as end:
                    return cast("T", end.value)
                yield from self._waited(wait)

    def _waited(self, wait: Wait) -> Generator[Wait, None, None]:
        """Wait. Messages that were handled before are settled in a long wait, because an outage may take hours."""
        if wait.call is not None:
            yield wait.at_most(SOON_SECONDS)
        if not wait.over:
            self.settle_handled()
            yield wait

    def settle_handled(self) -> None:
        """Settle the messages that were handled and are not settled yet."""
        if self._handled is not None:
            self._store(self._handled)

    def _handle(self, batch: Batch, *, postpone: bool) -> Generator[Wait, None, None]:
        messages = self._left(batch.messages)
        if not messages:
            self._store_in_passing(batch)
            return
        to_send, parkings = self._sort_out(messages, batch.now)
        size = sum(len(message.body) for message in to_send) if self._handled or postpone else 0
        most = self._limits
        if len(self._handled_messages) + len(to_send) > most.rows or self._handled_bytes + size > most.bytes:
            # A crash must never repeat more than one batch.
            self.settle_handled()
        settle_at = time.monotonic() + self._settle_within
        self._outcome = outcome = Outcome(parked=parkings)
        if to_send:
            outcome = yield from self._hand_over(to_send, batch)
        if outcome.open:
            self._settle_partly(batch, outcome.open)
        elif postpone and not self._outcome.parked and time.monotonic() < settle_at:
            self._handled, self._settle_at = batch.end, min(self._settle_at, settle_at)
            self._handled_messages += self._outcome.done
            self._handled_bytes += size
            self._outcome = Outcome()
        else:
            self._settle(batch.end, self._outcome)

    def _hand_over(self, to_send: list[Message], batch: Batch) -> Generator[Wait, None, Outcome]:
        """Call the handler, settle in parts while that takes long, and return the last part."""
        outcome = Outcome()
        quota = self._parked_queue.quota(self._batch_handler.policy.max_waiting)
        with closing(self._batch_handler.run(to_send, wait_for_destination=True, quota=quota, clock=batch)) as handling:
            for each in handling:
                if isinstance(each, Wait):
                    yield from self._waited(each)
                elif isinstance(each, Look):
                    each.others = self._more_available()
                else:
                    outcome = each
                    self._take(outcome, to_send, batch)
        return outcome

    def _take(self, outcome: Outcome, to_send: list[Message], batch: Batch) -> None:
        """Note a part of the outcome of a batch; settle it if the batch goes on."""
        if self._batch_handler.outages and outcome.accepted_topics:
            waited, or_more = (to_send, batch.end.target is not None) if outcome.paused else ([], False)
            self._parked_queue.tell_accepted(outcome.accepted_topics, waited, or_more=or_more)
        self._outcome.done += outcome.done
        self._outcome.parked += outcome.parked
        if outcome.next is not None:
            self._settle_before(outcome.next, batch)

    def _left(self, messages: list[Message]) -> list[Message]:
        """Return the messages that are not done already.

        Called as late as possible, because a message may become done at any moment.
        """
        if self._finished is None or not messages:
            return messages
        done = self._finished.finished(messages)
        return [message for message in messages if message.id not in done] if done else messages

    def _more_available(self) -> bool:
        """Return whether other messages could be tried: later ones of the log, or parked ones."""
        return self._parked_queue.due_in <= 0 or self._prefetcher.more()

    def _sort_out(self, messages: list[Message], now: datetime) -> tuple[list[Message], Parkings]:
        """Separate the messages that can be handled from those that have to be parked at once."""
        held = self._parked_queue.keys.among(messages)
        timed = [m for m in messages if m.deliver_at is not None or m.expires_at is not None]
        if not held and not timed:
            return messages, []
        # What may have arrived does not expire.
        unanswered = self._batch_handler.unanswered(timed, parked=False) if timed else set()
        return sort_out(messages, now, held=held, unanswered=unanswered)

    def _settle(self, end: Progress, outcome: Outcome) -> None:
        """Settle what came of a batch."""
        self._store(end, outcome)
        self._outcome = Outcome()

    def _store(self, end: Progress, outcome: Outcome | None = None) -> None:
        """Store an outcome, and progress that is behind it and behind all batches that were handled before."""
        began, outcome = time.monotonic(), outcome or Outcome()
        self._settlement.settle(end, outcome.parked)
        done = self._handled_messages + outcome.done if self._handled_messages else outcome.done
        self._handled, self._settle_at = None, math.inf
        self._handled_messages, self._handled_bytes = [], 0
        if outcome.parked:
            self._parked_queue.parked(outcome.parked)
        self._stored, self._passed, self._stored_at = end, False, time.monotonic()
        self._teller.settled(done, outcome.parked, self._stored_at - began)

    def _settle_before(self, next: Message, batch: Batch) -> None:
        """Settle the messages before the first that is not handled yet, while the batch goes on."""
        last = (next.id or 0) - 1
        settled, left = _split(self._outcome, last)
        if settled.done or settled.parked:
            self._store(batch.upto(last), settled)
            self._outcome = left

    def _settle_partly(self, batch: Batch, open: list[Message]) -> None:
        """After a stop within a batch, settle up to the last message that was handled; park the open ones before it."""
        self.settle_handled()
        handled = [m.id or 0 for m in self._outcome.done] + [
            m.id or 0 for m, parking in self._outcome.parked if parking not in (BLOCKED, EXPIRED, DELAYED)
        ]
        if handled:
            last = max(handled)
            why = "the worker stopped before it was sent"
            self._outcome.parked += [
                (m, self._batch_handler.policy.waiting(m, why)) for m in open if (m.id or 0) < last
            ]
            settled, _ = _split(self._outcome, last)
            self._settle(batch.upto(last), settled)
        # The other open messages will be read again from the stored progress.
        self._outcome = Outcome()
        self._prefetcher.forget().move_to(self._stored)

    def _store_in_passing(self, batch: Batch) -> None:
        """Store the progress of a batch without messages for us, only once in a while to save writes."""
        idle = time.monotonic() - self._stored_at
        self._passed = self._passed or batch.seen > 0
        every = self._upkeep.store_passed if self._passed else self._upkeep.store_idle
        arrives = self._stop is not None and has_arrived(batch.end, self._stop)
        if batch.end != self._stored and (idle >= every or arrives):
            self._store(batch.end)
            if not batch.seen:
                self._prefetcher.forget().move_to(batch.end)


def _split(outcome: Outcome, upto: float) -> tuple[Outcome, Outcome]:
    """Return what came of the messages up to a log id, and of those after it."""
    before, after = Outcome(), Outcome()
    for message in outcome.done:
        (before if (message.id or 0) <= upto else after).done.append(message)
    for message, parking in outcome.parked:
        (before if (message.id or 0) <= upto else after).parked.append((message, parking))
    return before, after
