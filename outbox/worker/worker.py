"""Workers: one engine for every subscription. Each repeats for the partition it owns: fetch, handle, settle."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial

from outbox.errors import HungHandlerError, LeaseLostError, StandbyError, SubscriptionError
from outbox.model.lease import Lease, Partition
from outbox.model.subscription import Declaration, Start, Subscription
from outbox.runtime.fork import in_child
from outbox.runtime.process import unique_name
from outbox.runtime.stop import Stop
from outbox.runtime.throttled_log import ThrottledLog
from outbox.runtime.wakeup import Wake
from outbox.store.database import Channel, Database
from outbox.store.dialects.dialect import Hint
from outbox.store.failure import in_one_line
from outbox.store.half_messages.op import DecidedHalves
from outbox.store.log.grace import Grace
from outbox.store.log.log import Log
from outbox.store.operations.ensure import ensure_outbox
from outbox.store.operations.parked_status import parked_counts
from outbox.store.subscriptions.acks import Acks
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.worker.activity_log import Activity
from outbox.worker.calls import Caller, Handler, LeasedCaller
from outbox.worker.declaring import Declaring
from outbox.worker.done_already import Finished
from outbox.worker.failure_log import FailureLog
from outbox.worker.failure_words import words_of
from outbox.worker.handle import BatchHandler
from outbox.worker.heartbeat import Heartbeat, HeldLease
from outbox.worker.hung import HungCalls
from outbox.worker.lease_search import LeaseSearch, lease_logger
from outbox.worker.notice import Notice
from outbox.worker.partition import PartitionWorker
from outbox.worker.policy import HandlerPolicy
from outbox.worker.polling import Polling
from outbox.worker.settings import Settings
from outbox.worker.settle import Unsettled
from outbox.worker.waiting import drive

logger = logging.getLogger("outbox")
#: The longest pause between two tries: to reach a database that is away, and to settle what was sent already.
_PAUSE_SECONDS, _UNSETTLED_PAUSE_SECONDS = 2.0, 30.0


class Worker:
    """Handles one subscription: waits for its lease, works until it is lost, and begins again.

    A database that goes away is waited for; nothing has to be done by hand. `run` returns after `stop`.
    """

    def __init__(
        self,
        database: Database,
        declared: Declaration,
        handler: Handler | Caller,
        *,
        start: Start | None = "earliest",
        policy: HandlerPolicy | None = None,
        settings: Settings | None = None,
        on_idle: Callable[[Channel], None] = lambda _channel: None,
        hung: HungCalls | None = None,
        stop: Stop | None = None,
    ) -> None:
        """`handler`: a `Caller` if other workers call the same handler. `start`: where a new subscription begins; None:
        somebody else creates it. `on_idle`: called again and again, with a connection that does nothing else meanwhile.
        `hung`: the calls of earlier workers that did not come back. `stop`: this worker is one of those that it stops.
        """
        self._database = database
        self._declared = declared
        self._caller = handler if isinstance(handler, Caller) else Caller(handler)
        self._policy = policy or HandlerPolicy()
        self._settings = settings or Settings()
        self._on_idle = on_idle
        self._declaring = Declaring(declared, start)
        self._notice = Notice(database, declared.name)
        self._failure_log = FailureLog(
            declared.name, declared.destination, words=words_of(declared), note=self._notice.write
        )
        done = "sent" if declared.destination else "done"
        self._activity = Activity(declared.name, done=done, every=self._settings.upkeep.log_activity)
        self._new_owner()
        in_child(self._new_owner)
        self.wake = Wake()
        self._stop = Stop(stop, wake=self.wake.set)
        #: Asked when a command wants the lease: the work with it ends as for a stop, and then waits for it again.
        self._give_back = Stop(self._stop, wake=self.wake.set)
        self._throttled_log = ThrottledLog(logger)
        self._search = LeaseSearch(declared.name, self._settings.lease, self._notice)
        self._hung = HungCalls() if hung is None else hung
        self._endless = False
        self._unsettled = Unsettled()

    @property
    def stopping(self) -> bool:
        """True from when a stop is asked until the worker has stopped."""
        return self._stop.asked

    @property
    def owner(self) -> str:
        """The name under which this worker holds its lease.

        Host and process, for people, and a random part that is new after each start and each fork, so that nobody takes
        this worker for an earlier one.
        """
        return self._owner

    def _new_owner(self) -> None:
        self._owner = unique_name()

    def run(self) -> None:
        """Work until `stop` is called, also beside calls that hang, whose messages are held until they come back.

        Raises:
            HungHandlerError: so many calls of the handler hang that only a new process helps; `once` and `until_empty`
                raise it too. The lease is not given back, because another worker would send their messages beside them.
        """
        self._endless = True
        try:
            self._work(self._step_or_wait)
        finally:
            self._endless = False

    def until_empty(self) -> None:
        """Work until everything committed before now is handled, and nothing that is parked is due.

        It also waits for messages whose grace is not over.

        Raises:
            HungHandlerError: everything else is handled, and a call hangs that has some messages.
        """
        self._work(self._step_or_end)

    def once(self) -> None:
        """Handle one batch, if there is one."""
        self._work(lambda held: not self._step(held) and self._wait_for_grace(held))

    def stop(self) -> None:
        """Finish what is under way, give the lease back, and return from `run`. May be called from anywhere.

        While a call of the handler hangs, the lease is not given back: it expires.
        """
        self._stop.ask()

    def reset(self) -> None:
        """Forget a stop that was not followed."""
        self._stop.withdraw()

    # The stages

    def _work(self, step: Callable[[PartitionWorker], bool]) -> None:
        """Take the lease and call `step` until it returns False, over any number of lost connections."""
        try:
            self._work_until_stopped(step)
        finally:
            self._stop.withdraw()

    def _work_until_stopped(self, step: Callable[[PartitionWorker], bool]) -> None:
        failures = 0
        while not self._stop.asked:
            try:
                with closing(self._database.open()) as channel:
                    subscription = self._declare(channel)
                    with self._at_work(channel, subscription) as partition_worker:
                        while partition_worker is not None and not self._stop.asked and not self._gives_back():
                            self._on_idle(channel)
                            goes_on = step(partition_worker)
                            if not self._unsettled:
                                failures = 0
                                self._failure_log.went_on()
                                self._notice.withdraw(channel)
                            self._activity.tell_if_due(partial(parked_counts, channel, self._declared.name))
                            if not goes_on and not self._give_back.asked:
                                return
            except LeaseLostError as error:
                self._throttled_log.warning("%s", error)
            except HungHandlerError:
                raise
            except Exception as error:
                failures += 1
                self._explain_or_raise(error)
            longest = _UNSETTLED_PAUSE_SECONDS if self._unsettled else _PAUSE_SECONDS
            self.rest(random.uniform(0.05, min(longest, 0.1 * 2 ** min(failures, 10))))

    def _explain_or_raise(self, error: Exception) -> None:
        """Log the error if another try may succeed; otherwise raise it."""
        # A worker that has worked here waits for the end of a failover, until the address leads to a primary again.
        failover = self._declaring.known and isinstance(error, StandbyError)
        passes = failover or self._database.transient(error)
        line, _ = in_one_line(error)
        if self._unsettled and self._unsettled.explains(error) and (passes or self._endless):
            # Also errors that only a person can mend, because a new process would send the batch again.
            why = f"settling fails, and nothing is sent until it works again: {line}"
            if self._throttled_log.warning("%s: %s", self._declared.name, why):
                self._notice.write(why)
        elif passes:
            self._throttled_log.warning("the database is away, trying again: %s", type(error).__name__)
        else:
            # Where its declaration is refused, that was noted already, because such a worker may have no lease.
            if not isinstance(error, SubscriptionError):
                self._notice.write(line)
            raise error

    def _declare(self, channel: Channel) -> Subscription:
        ensure_outbox(channel)
        return self._declaring.declare(channel, self.owner)

    @contextmanager
    def _at_work(self, channel: Channel, subscription: Subscription) -> Iterator[PartitionWorker | None]:
        """Take the lease and yield a worker for the partition, or None when a stop came first; then give it back."""
        partition = subscription.partition(0)
        taken = self._acquire(channel, partition)
        if taken is None:
            yield None
            return
        lease, at = taken
        settings = self._settings
        self._hung.taken(lease)
        heartbeat = Heartbeat(self._database, length=settings.lease, every=settings.renew_every, wake=self.wake)
        self._give_back.withdraw()
        try:
            held = heartbeat.hold(lease, at, self._give_back)
            # Declared again, because somebody may have altered the subscription while this worker waited for the lease.
            subscription = self._declare(channel)
            if not subscription.grace:
                # With a grace, hints of commits are of no use: a message is handled long after its commit.
                channel.listen()
            partition_worker = self._begin(channel, held, subscription)
            with closing(partition_worker):
                yield partition_worker
                partition_worker.settle_handled()
        finally:
            heartbeat.close()
            self._caller.close()
            if not self._hung.unfinished:
                # While calls hang the lease expires instead, or another worker would send their messages beside them.
                with suppress(Exception):
                    Leases(channel).release(lease)

    def _begin(self, channel: Channel, held: HeldLease, subscription: Subscription) -> PartitionWorker:
        ProgressLog(channel).require_same_ids(subscription.name)
        policy = replace(self._policy, block_on_dead=subscription.on_dead != "continue")
        calls = LeasedCaller(
            self._caller,
            held,
            needs=min(policy.deadline, self._settings.lease / 2).total_seconds(),
            deadline=policy.deadline.total_seconds(),
            wake=self.wake,
        )
        batch_handler = BatchHandler(
            calls,
            policy,
            stop=self._give_back,
            most=self._settings.limits.rows,
            part_seconds=self._settings.upkeep.settle_parts,
            hung=self._hung,
            failure_log=self._failure_log,
        )
        log = Log(self._settings.limits, subscription.selection, held.lease.partition)
        logger.info("subscription %s: lease taken, epoch %d", subscription.name, held.lease.epoch)
        self._channel = channel
        self._polling = Polling(*(pause.total_seconds() for pause in self._settings.poll))
        return PartitionWorker(
            channel,
            held.lease,
            log,
            self._settings,
            batch_handler,
            policy,
            grace=Grace(subscription.grace, self._settings.poll) if subscription.grace else None,
            finished=self._finished_of(channel, subscription),
            failure_log=self._failure_log,
            unsettled=self._unsettled,
            activity=self._activity,
        )

    def _acquire(self, channel: Channel, partition: Partition) -> tuple[Lease, float] | None:
        """Wait for the lease; return it with a moment before it was taken, or None when a stop came first."""
        while not self._stop.asked:
            self._on_idle(channel)
            for lease, before in self._search.look(channel, [partition], self.owner).items():
                return lease, before
            self.rest(self._search.pause())
        return None

    def _gives_back(self) -> bool:
        """Return whether a command wants the lease and can have it now.

        While a call of the handler hangs it cannot: what the command changes would be done beside that call.
        """
        if not self._give_back.asked:
            return False
        if self._hung.unfinished:
            self._give_back.withdraw()
            return False
        lease_logger.info("%s: a command wants the lease; giving it back", self._declared.name)
        return True

    def _step(self, partition_worker: PartitionWorker, *, postpone: bool = False) -> int:
        """Handle what there is; return the number of rows seen."""
        return drive(partition_worker.step(postpone=postpone), self.wake)

    def _step_or_wait(self, partition_worker: PartitionWorker) -> bool:
        """Handle what there is, or wait for a hint: for a short time at first, for longer when nothing comes."""
        if found := self._step(partition_worker, postpone=self._polling.many):
            self._polling.came(found)
            return True
        hint = self._channel.hinted()
        if hint is None and self.wake.wait(min(self._polling.pause(), partition_worker.due_in), self._channel.fileno):
            # Notifications are read before the next look at the log, so that none is left to cause another look.
            hint = self._channel.hinted() or Hint()
        if hint is not None:
            self._polling.hinted(hint.pause)
        return True

    def _step_or_end(self, partition_worker: PartitionWorker) -> bool:
        """Handle what there is, or wait for the grace of messages; return False when nothing is left."""
        if self._step(partition_worker) or self._wait_for_grace(partition_worker):
            return True
        if any(hung.call.hangs for hung in self._hung.unfinished):
            raise HungHandlerError("a call of the handler never came back; what it has is held until the process ends")
        return False

    def _wait_for_grace(self, partition_worker: PartitionWorker) -> bool:
        """Rest after an idle step if messages wait for their grace; return False if none does or a stop is asked."""
        return partition_worker.awaits_grace() and self.rest(partition_worker.due_in)

    # Helpers

    def rest(self, seconds: float) -> bool:
        """Sleep; return False when a stop is asked."""
        return self._stop.rest(seconds)

    def _finished_of(self, channel: Channel, subscription: Subscription) -> Finished | None:
        if subscription.kind == "check":
            return DecidedHalves(channel)
        return None if subscription.direct is None else Acks(channel, subscription.direct)
