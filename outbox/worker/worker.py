"""Workers: one engine for every subscription. Each repeats for the partition it owns: fetch, handle, settle."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

from outbox.errors import HungHandlerError, LeaseLostError, StandbyError, SubscriptionError
from outbox.model.lease import Holder, Lease, Partition
from outbox.model.subscription import Declaration, Start, Subscription
from outbox.model.verdict import describe
from outbox.runtime.clock import clock
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
from outbox.store.subscriptions.leases import Leases, LeaseWatch
from outbox.store.subscriptions.notices import RefusalNotice
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.activity_log import Activity
from outbox.worker.calls import Caller, Handler, HungCalls
from outbox.worker.done_already import Finished
from outbox.worker.failure_log import FailureLog
from outbox.worker.failure_words import words_of
from outbox.worker.handle import BatchHandler
from outbox.worker.heartbeat import LeaseHeartbeat
from outbox.worker.partition import PartitionWorker
from outbox.worker.policy import HandlerPolicy
from outbox.worker.polling import Polling
from outbox.worker.settings import Settings
from outbox.worker.settle import Unsettled

logger = logging.getLogger("outbox")
#: Says which worker works and which stands by. A logger of its own, because many people want to see these lines and
#: few others.
lease_logger = logging.getLogger("outbox.lease")

#: The longest pause between two tries: to reach a database that is away, and to settle what was sent already.
_PAUSE_SECONDS, _UNSETTLED_PAUSE_SECONDS = 2.0, 30.0
_MOST_NOTICE = 500


class Worker:
    """Handles one subscription: waits for its lease, works until it is lost, and begins again.

    A database that goes away is waited for; nothing has to be done by hand. `run` returns after `stop`.
    """

    def __init__(
        self,
        database: Database,
        declared: Declaration,
        handler: Handler,
        *,
        start: Start | None = "earliest",
        policy: HandlerPolicy | None = None,
        settings: Settings | None = None,
        serialize: Callable[[Callable[[], None]], AbstractContextManager[object]] = nullcontext,
        on_idle: Callable[[Channel], None] = lambda _channel: None,
        hung: HungCalls | None = None,
        stop: Stop | None = None,
    ) -> None:
        """`start`: where a new subscription begins; None: somebody else creates it. `serialize`: held during each call
        of the handler; it calls its argument before it waits. `on_idle`: called again and again, with a connection that
        does nothing else meanwhile. `hung`: the calls of earlier workers that did not come back. `stop`: this worker is
        one of those that it stops.
        """
        self._database = database
        self._declared = declared
        self._handler = handler
        self._start = start
        self._policy = policy or HandlerPolicy()
        self._settings = settings or Settings()
        self._serialize = serialize
        self._on_idle = on_idle
        self._failure_log = FailureLog(declared.name, declared.destination, words=words_of(declared), note=self._note)
        done = "sent" if declared.destination else "done"
        self._activity = Activity(declared.name, done=done, every=self._settings.upkeep.log_activity)
        self._stands_by = self._leases_differ = False
        self._new_owner()
        in_child(self._new_owner)
        self.wake = Wake()
        self._stop = Stop(stop, wake=self.wake.set)
        #: Asked when a command wants the lease: the work with it ends as for a stop, and then waits for it again.
        self._give_back = Stop(self._stop, wake=self.wake.set)
        self._throttled_log = ThrottledLog(logger)
        self._known = False
        self._watch = LeaseWatch(self._settings.lease)
        self._hung = HungCalls() if hung is None else hung
        self._gives_up, self._endless = True, False
        self._unsettled = Unsettled()
        #: True when a worker, perhaps this one, has written to the database why it does not work.
        self._noticed = False
        self._refusal_notice = RefusalNotice(declared.name)

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

    def run(self, *, gives_up: bool = True) -> None:
        """Work until `stop` is called.

        `gives_up`: whether the worker gives up when calls of the handler never come back, so that the process is
        started again. Otherwise it goes on beside these calls, and does not handle their messages while they hang.

        Raises:
            HungHandlerError: the worker gave up.
        """
        self._gives_up, self._endless = gives_up, True
        try:
            self._work(self._step_or_wait)
        finally:
            self._gives_up, self._endless = True, False

    def until_empty(self) -> None:
        """Work until everything committed before now is handled, and nothing that is parked is due.

        It also waits for messages whose grace is not over.
        """
        self._work(lambda partition_worker: bool(partition_worker.step()) or self._wait_for_grace(partition_worker))

    def once(self) -> None:
        """Handle one batch, if there is one."""
        self._work(lambda partition_worker: not partition_worker.step() and self._wait_for_grace(partition_worker))

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
                                self._withdraw_notice(channel)
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
        failover = self._known and isinstance(error, StandbyError)
        passes = failover or self._database.transient(error)
        line, _ = in_one_line(error)
        if self._unsettled and self._unsettled.explains(error) and (passes or self._endless):
            # Also errors that only a person can mend, because a new process would send the batch again.
            why = f"settling fails, and nothing is sent until it works again: {line}"
            if self._throttled_log.warning("%s: %s", self._declared.name, why):
                self._note(why)
        elif passes:
            self._throttled_log.warning("the database is away, trying again: %s", type(error).__name__)
        else:
            # Where its declaration is refused, that was noted already, because such a worker may have no lease.
            if not isinstance(error, SubscriptionError):
                self._note(line)
            raise error

    def _declare(self, channel: Channel) -> Subscription:
        ensure_outbox(channel)
        with self._refusal_notice.noted(channel, self.owner):
            return self._declared_on(channel)

    def _declared_on(self, channel: Channel) -> Subscription:
        known = Subscriptions(channel).find(self._declared.name)
        if known is None and self._known:
            # Declared anew, the subscription would begin at its start, and everything would be sent again.
            raise SubscriptionError(f"subscription {self._declared.name!r} was dropped under this worker")
        # Once it has begun, it does not depend on the others: what is altered of one route stops that one only.
        declared = replace(self._declared, beside=()) if self._known else self._declared
        subscription = Subscriptions(channel).declare(declared, None if self._known else self._start)
        if not self._known:
            # Only by a worker that begins: one that reconnects does not undo what a newer worker has stored.
            subscription = Subscriptions(channel).store_hosts(subscription, self._declared)
        self._known = True
        if known is None or (known.destination is None and known.direct is None):
            logger.info("subscription %s begins at %s", subscription.name, self._start if known is None else "earliest")
        if subscription.partitions != 1:
            raise SubscriptionError(
                f"{subscription.name} has {subscription.partitions} partitions; this version owns one"
            )
        return subscription

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
        caller = Caller(self._handler, lease)
        heartbeat: LeaseHeartbeat | None = None
        self._give_back.withdraw()
        try:
            heartbeat = LeaseHeartbeat(
                self._database,
                lease,
                length=settings.lease,
                every=settings.renew_every,
                taken=at,
                lost=self.wake.set,
                wanted=self._give_back.ask,
            )
            # Declared again, because somebody may have altered the subscription while this worker waited for the lease.
            subscription = self._declare(channel)
            if not subscription.grace:
                # With a grace, hints of commits are of no use: a message is handled long after its commit.
                channel.listen()
            partition_worker = self._begin(channel, lease, subscription, heartbeat, caller)
            with closing(partition_worker):
                yield partition_worker
                partition_worker.settle_handled()
        finally:
            if heartbeat is not None:
                heartbeat.stop()
            caller.close()
            if not self._hung.unfinished:
                # While calls hang the lease expires instead, or another worker would send their messages beside them.
                with suppress(Exception):
                    Leases(channel).release(lease)

    def _begin(
        self, channel: Channel, lease: Lease, subscription: Subscription, heartbeat: LeaseHeartbeat, caller: Caller
    ) -> PartitionWorker:
        ProgressLog(channel).require_same_ids(subscription.name)
        policy = replace(self._policy, block_on_dead=subscription.on_dead != "continue")
        enough = min(policy.deadline, self._settings.lease / 2).total_seconds()
        batch_handler = BatchHandler(
            caller,
            policy,
            before_call=lambda: heartbeat.require(enough),
            rest=self._give_back.rest,
            most=self._settings.limits.rows,
            part_seconds=self._settings.upkeep.settle_parts,
            hung=self._hung,
            gives_up=self._gives_up,
            serialize=self._serialize,
            failure_log=self._failure_log,
        )
        log = Log(self._settings.limits, subscription.selection, lease.partition)
        logger.info("subscription %s: lease taken, epoch %d", subscription.name, lease.epoch)
        self._channel = channel
        self._polling = Polling(*(pause.total_seconds() for pause in self._settings.poll))
        return PartitionWorker(
            channel,
            lease,
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
        leases, length = Leases(channel), self._settings.lease
        while not self._stop.asked:
            self._on_idle(channel)
            holder = leases.look(partition)
            if holder is None:
                raise LeaseLostError(f"subscription {partition.subscription!r} was dropped")
            self._noticed = self._noticed or holder.notice is not None
            claim, before = self._watch.look(holder), clock()
            lease = None if holder.wanted else leases.acquire(partition, self.owner, length, claim)
            if lease is not None:
                self._say_that_it_takes_over()
                return lease, before
            self._say_that_it_stands_by(holder)
            self.rest(random.uniform(0.2, 0.4))
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

    def _step_or_wait(self, partition_worker: PartitionWorker) -> bool:
        """Handle what there is, or wait for a hint: for a short time at first, for longer when nothing comes."""
        if found := partition_worker.step(postpone=self._polling.many):
            self._polling.came(found)
            return True
        hint = self._channel.hinted()
        if hint is None and self.wake.wait(min(self._polling.pause(), partition_worker.due_in), self._channel.fileno):
            # Notifications are read before the next look at the log, so that none is left to cause another look.
            hint = self._channel.hinted() or Hint()
        if hint is not None:
            self._polling.hinted(hint.pause)
        return True

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

    def _say_that_it_stands_by(self, holder: Holder) -> None:
        """Log that this worker stands by; only once, over any number of lost connections."""
        if not self._stands_by:
            self._stands_by = True
            watched = (holder.length or self._settings.lease).total_seconds()
            held = "another worker holds the lease; standing by"
            left = f"the lease has run out and was not given back; standing by until nobody renews it for {watched:g} s"
            lease_logger.info("%s: %s", self._declared.name, held if holder.live else left)
        # A lease that was never renewed may be that of a command, which holds it for a short time.
        length, differs = self._settings.lease, bool(holder.renewals) and holder.length != self._settings.lease
        if differs and holder.length is not None and not self._leases_differ:
            self._leases_differ = True
            here = f"that of the worker which stands by {length.total_seconds():g} s"
            differ = f"its lease is {holder.length.total_seconds():g} s long, {here}; give both the same --lease"
            lease_logger.warning("%s: %s", self._declared.name, differ)
            self._note(differ)

    def _note(self, text: str, since: float = 0.0) -> None:
        """Write why this worker does not work to where `outbox status` reads it.

        `since`: for how many seconds it does not work already.
        """
        self._noticed = True
        with suppress(Exception), closing(self._database.open()) as channel:
            Leases(channel).note(self._declared.name, describe(text)[:_MOST_NOTICE], since=since)

    def _withdraw_notice(self, channel: Channel) -> None:
        self._failure_log.went_on()
        if self._noticed:
            Leases(channel).note(self._declared.name, None)
            self._noticed = False

    def _say_that_it_takes_over(self) -> None:
        if self._stands_by:
            self._stands_by = False
            lease_logger.info("%s: the lease is free; taking over", self._declared.name)
