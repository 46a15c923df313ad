"""One subscription in a worker: its partitions, and its state over leases and connections."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

from outbox.errors import HungHandlerError, LeaseLostError, SubscriptionError
from outbox.model.lease import Lease, Partition
from outbox.model.position import Position
from outbox.model.subscription import AT, Subscription, place_of
from outbox.runtime.named import named
from outbox.runtime.stop import Stop
from outbox.runtime.text import counted
from outbox.store.database import Channel, Database
from outbox.store.failure import in_one_line
from outbox.store.operations.ensure import ensure_outbox, of_other_tables
from outbox.store.operations.parked_status import parked_counts
from outbox.store.operations.purge import Purge
from outbox.store.subscriptions.instances import drop_gone
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.telemetry.activity_log import Activity
from outbox.telemetry.events import LeaseLost, LeaseTaken, Listeners, Teller
from outbox.telemetry.failure_log import FailureLog, words_of
from outbox.worker import upkeep
from outbox.worker.assigned import Assigned
from outbox.worker.calls import HeldLease
from outbox.worker.connection import Connection, ConnectionLostError
from outbox.worker.declaring import Declaring
from outbox.worker.deferral import DEFERRED_SECONDS
from outbox.worker.failures import Failures, Tries
from outbox.worker.handle import BatchHandler
from outbox.worker.hung import HungCalls, hung_calls_of
from outbox.worker.job import Job
from outbox.worker.lease_search import LeaseSearch, lease_logger
from outbox.worker.maintenance import Task
from outbox.worker.notice import Notice
from outbox.worker.outages import Outages
from outbox.worker.pace import Paces
from outbox.worker.partition import PartitionWorker
from outbox.worker.paused import Paused, log_pauses
from outbox.worker.settings import Settings
from outbox.worker.turn import Turn

logger = logging.getLogger("outbox")


class SubscriptionWorker:
    """Works for one subscription: declares it, takes its leases, and steps its partitions."""

    def __init__(
        self,
        database: Database,
        job: Job,
        settings: Settings,
        hung: dict[Partition, HungCalls],
        listeners: Listeners,
    ) -> None:
        """`hung`: calls that did not come back, also of earlier workers. `listeners`: of the worker."""
        declared = job.declared
        name, words = declared.name, words_of(declared, database.commands)
        self.job = job
        self.turns: dict[Partition, Turn] = {}
        #: When to look for leases again, by `time.monotonic`.
        self.look_at = 0.0
        #: When to look for pauses again.
        self._pauses_at = 0.0
        self._settings = settings
        self._commands = database.commands
        self._hung = hung
        self._declaring = Declaring(declared, job.start)
        notice = Notice(database, name, words)
        self._search = LeaseSearch(name, settings.lease, notice, attempts=job.policy.retry.attempts)
        self._failures = Failures(name, notice, optional=job.start is None)
        done = "settled" if declared.kind == "check" else "sent" if declared.destination else "done"
        self._activity = Activity(name, done=done, every=upkeep.LOG_ACTIVITY)
        own = Listeners(listeners)
        for told in (FailureLog(name, words).told, self._activity.told, notice.told):
            own.listen(told)
        self._teller = Teller(own, {"database": database, "subscription": name})
        self._outages = Outages(self._teller, place_of(declared))
        self._paces = Paces()
        self._paused = Paused()
        #: The subscription as it was declared on this connection.
        self._stored: Subscription | None = None
        #: True when the subscription was not there when it was last declared on this connection.
        self._awaited = False

    @property
    def known(self) -> bool:
        """True when the subscription was declared before."""
        return self._declaring.known

    @property
    def finished(self) -> bool:
        """True when each partition has handled everything it was to handle, or the subscription is not there."""
        if self._stored is None:
            return self._failures.tries().finished
        return all(self._failures.tries(each).finished for each in self._stored.all_partitions())

    def begin(self) -> None:
        """Begin to work, with everything still to be handled."""
        self._failures.begin()

    def look(self, connection: Connection) -> None:
        """Declare the subscription and take free leases, when it is time to look; wait for nothing."""
        self._follow_pauses(connection)
        if time.monotonic() < self.look_at:
            return
        self.look_at, taken = math.inf, dict[Lease, float]()
        with self._tried(connection, None):
            if self._stored is None or self._stored.stop_at is not None:
                # Declared again while all partitions are to meet, because another worker may take that back.
                self._stored = self._declare(connection)
            self._failures.tries().failures = 0
            if self._stored is None:
                # Somebody else creates it, and there is nothing to do before.
                self._failures.tries().finished = True
                self.look_at = time.monotonic() + upkeep.FIND_BACKFILL
                return
            if self._stored.is_paused and not self._paused.some_decided(connection.channel, self._stored):
                self._stand_still(connection, self._stored)
                return
            taken = self._take_leases(connection, self._stored)
        try:
            while taken:
                lease, at = taken.popitem()
                with self._tried(connection, lease.partition):
                    self.turns[lease.partition] = self._begin(connection, lease, at)
        finally:
            for lease in taken:
                self._release(connection, lease)

    def _follow_pauses(self, connection: Connection) -> None:
        """Look, once in the longest pause between two polls, what people have paused or resumed; all turns follow."""
        known, now = self._stored, time.monotonic()
        if known is None or now < self._pauses_at:
            return
        self._pauses_at = now + self._settings.poll[1].total_seconds()
        with self._tried(connection, None):
            stored = Subscriptions(connection.channel).find(known.name)
            if stored is None:
                return
            if stored.pauses != known.pauses:
                self._stored, self.look_at = replace(known, pauses=stored.pauses), 0.0
                log_pauses(known, stored)
            for turn in self.turns.values():
                turn.follow(stored, connection.stop)

    def _stand_still(self, connection: Connection, stored: Subscription) -> None:
        """Take no lease of a paused subscription; look again with the next poll.

        Raises:
            SubscriptionError: the work was to end when everything is handled.
        """
        if connection.until == "empty" and not connection.stop.asked:
            assert stored.pause is not None
            why, command = stored.pause.in_words(), stored.pause.resume(stored.follows or stored.name, self._commands)
            raise SubscriptionError(f"{stored.name} is {why}; to go on, run: {command}")
        for partition in stored.all_partitions():
            self._failures.tries(partition).finished = connection.until == "once"
        self.look_at = self._pauses_at

    def _has_turn(self, partition: Partition, stored: Subscription) -> bool:
        """Return whether a partition is at work, or has looked for decisions in this pause already."""
        return partition in self.turns or (stored.is_paused and self._paused.has_looked(partition))

    def _take_leases(self, connection: Connection, stored: Subscription) -> dict[Lease, float]:
        """Take the free leases of this worker's share; return each with a moment before."""
        if stored.stop_at is None:
            # Turns that stand where partitions were to meet, and kept their lease because a call hangs, begin anew.
            for partition in [each for each, turn in self.turns.items() if turn.arrived]:
                self._end(connection, partition)
        elif stored.next_partitions is not None and self._take_back_if_hung(connection, stored):
            self._stored, self.look_at = None, 0.0
            return {}
        channel, owner, partitions = connection.channel, connection.owner, stored.all_partitions()
        met = self._search.look(channel, stored, owner, alone=connection.until != "stopped")
        if met is None:
            self._stored, self.look_at = None, 0.0
            return {}
        self._note_ended(stored, met)
        for partition, turn in self.turns.items():
            if partition not in self._search.own:
                turn.held.stop.ask()
        tries = {each: self._failures.tries(each) for each in partitions if each in self._search.own - met}
        open = [each for each, tried in tries.items() if not (tried.finished or self._has_turn(each, stored))]
        if any(each.generation != stored.generation for each in self.turns):
            # Their calls end first, or are left behind: until then the keys that they have are not known here.
            open = []
        now, soon = time.monotonic(), time.monotonic() + self._search.pause()
        taken = self._search.take(channel, [each for each in open if tries[each].again_at <= now], owner)
        left = set(open) - {lease.partition for lease in taken}
        again = [max(soon, tries[each].again_at) for each in left]
        # Also with all of its share this worker looks whether others have come, and whether all partitions have met.
        if stored.next_partitions is not None:
            again.append(soon)
        elif stored.stop_at is not None or len(partitions) > 1 or self.turns.keys() - set(partitions):
            again.append(now + self._settings.renew_every.total_seconds())
        self.look_at = min(again, default=math.inf)
        return taken

    def _note_ended(self, stored: Subscription, met: Collection[Partition]) -> None:
        """Note that nothing is left to do for partitions of a backfill that have come to their end."""
        for partition in met if stored.kind == "backfill" else ():
            self._failures.tries(partition).finished = True

    def step(self, connection: Connection) -> None:
        """Step each partition with work to do, until each waits."""
        for partition, turn in list(self.turns.items()):
            if turn.due:
                with self._tried(connection, partition):
                    self._step(connection, partition, turn)

    def _step(self, connection: Connection, partition: Partition, turn: Turn) -> None:
        try:
            goes_on = turn.step()
        except BaseException:
            self._end(connection, partition)
            raise
        if turn.between:
            self._note_step(connection, self._failures.tries(partition))
        if not goes_on:
            self._paused.note_looked(partition)
            self._failures.tries(partition).finished = turn.finished
            self._note_given_back(connection, turn)
            self._end(connection, partition)

    def _note_step(self, connection: Connection, tries: Tries) -> None:
        """Note the end of a step."""
        if not tries.unsettled:
            tries.failures = 0
            connection.worked = True
            if not self._failures.some and not any(turn.pauses for turn in self.turns.values()):
                self._failures.notice.withdraw(connection.channel)
        self._activity.tell_if_due(partial(parked_counts, connection.channel, self.job.declared.name))

    def _note_given_back(self, connection: Connection, turn: Turn) -> None:
        """Note when to look again for a lease that is given back, and log why."""
        tries, deferral = self._failures.tries(turn.held.lease.partition), self.job.deferral
        if deferral is not None and deferral.asked:
            tries.again_at = time.monotonic() + DEFERRED_SECONDS
        elif not turn.finished and not connection.stop.asked:
            name, why = self.job.declared.name, self._why(turn)
            lease_logger.info("%s: %s; giving it back", name, why, extra=named("lease_left", subscription=name))
        self.look_at = min(self.look_at, tries.again_at)

    def _why(self, turn: Turn) -> str:
        """Return in words why a lease is given back while the worker works."""
        number = turn.held.lease.partition.partition
        if turn.arrived:
            is_backfill = self._stored is not None and self._stored.kind == "backfill"
            return f"partition {number} has come to {'its end' if is_backfill else 'where all partitions meet'}"
        if self._stored is not None and self._stored.is_paused and turn.began_under == self._stored.pauses:
            return f"all is paused, and decisions on messages of partition {number} were looked for"
        if self._stored is not None and turn.began_under != self._stored.pauses:
            return f"what is paused has changed, which concerns partition {number}"
        if turn.held.lease.partition not in self._search.own:
            return f"another worker is to have partition {number}"
        return f"a command wants the lease of partition {number}"

    def close(self, connection: Connection) -> None:
        """Give all leases back, and drop the state of this connection."""
        self._search.sign_off(connection.channel, connection.owner)
        for partition in list(self.turns):
            self._end(connection, partition)
        self._stored, self._awaited, self.look_at = None, False, 0.0

    def note(self, line: str) -> None:
        """Write why the worker does not work to where `outbox status` reads it."""
        self._failures.notice.write(line)

    def _end(self, connection: Connection, partition: Partition) -> None:
        turn = self.turns.pop(partition)
        try:
            turn.close()
        finally:
            self._give_back(connection, turn.held)

    def _give_back(self, connection: Connection, held: HeldLease) -> None:
        connection.heartbeat.drop(held)
        self._release(connection, held.lease)
        error = sys.exception()
        why = in_one_line(error, self._commands)[0] if isinstance(error, Exception) else None
        self._teller.of_partition(held.lease.partition.partition).tell(LeaseLost, epoch=held.lease.epoch, error=why)

    def _release(self, connection: Connection, lease: Lease) -> None:
        if connection.stop.asked:
            self._search.sign_off(connection.channel, connection.owner)
        # While calls hang it expires instead, or another worker would send their messages beside them.
        hung = hung_calls_of(self._hung, lease.partition, connection.channel.database.slots)
        if not hung.unfinished:
            with suppress(Exception):
                Leases(connection.channel).release(lease)

    # The beginning of a turn

    def _declare(self, connection: Connection) -> Subscription | None:
        if self._awaited and Subscriptions(connection.channel).find(self.job.declared.name) is None:
            return None
        ensure_outbox(connection.channel)
        declared = self._declaring.declare(connection.channel, connection.owner)
        self._awaited = declared is None
        return declared

    def _begin(self, connection: Connection, lease: Lease, taken: float) -> Turn:
        """Begin the turn of a partition whose lease was taken; `taken`: a moment before."""
        stop = Stop(connection.stop, wake=connection.wake.set)
        hung = hung_calls_of(self._hung, lease.partition, connection.channel.database.slots)
        hung.taken(lease)
        try:
            held = connection.heartbeat.hold(lease, taken, stop)
        except BaseException:
            self._release(connection, lease)
            raise
        self._teller.of_partition(lease.partition.partition).tell(LeaseTaken, epoch=lease.epoch)
        try:
            # Declared again, because somebody may have altered the subscription while this worker waited for the lease.
            self._stored = subscription = self._declare(connection)
            if subscription is None:
                raise LeaseLostError(f"subscription {lease.partition.subscription!r} was dropped")
            assigned = self._assign(connection, held, hung, subscription)
            keep = None if lease.partition.partition else self.job.keep
            tasks = _other_tasks(connection.channel, subscription, keep)
            if subscription.is_paused:
                # The turn ends as it begins, which carries out decisions of people.
                stop.ask()
            return Turn.of(assigned, PartitionWorker.of(assigned, BatchHandler.of(assigned), tasks))
        except BaseException:
            self._give_back(connection, held)
            raise

    def _assign(self, connection: Connection, held: HeldLease, hung: HungCalls, stored: Subscription) -> Assigned:
        """Return a partition with what its work needs; hints wake the work from now on."""
        channel, partition = connection.channel, held.lease.partition
        ProgressLog(channel).require_same_ids(stored.name)
        if not stored.grace:
            # With a grace, hints of commits are of no use: a message is handled long after its commit.
            channel.listen()
        # Each command that works until there is nothing more takes the lease.
        level = logging.INFO if connection.until == "stopped" else logging.DEBUG
        logger.log(level, "subscription %s: lease taken, epoch %d", stored.name, held.lease.epoch)
        if self.job.deferral is not None:
            self.job.deferral.begin(held.stop if connection.until == "stopped" else None)
        return Assigned(
            channel=channel,
            until=connection.until,
            wake=connection.wake,
            held=held,
            subscription=stored,
            job=self.job,
            settings=self._settings,
            teller=self._teller,
            hung=hung,
            outages=self._outages,
            unsettled=self._failures.tries(partition).unsettled,
            pace=self._paces.of(partition, stored),
        )

    def _take_back_if_hung(self, connection: Connection, stored: Subscription) -> bool:
        """Take the order of another number of partitions back if a call hangs; return whether the order was taken back.

        The lease of such a partition is not given back, so the partitions would never meet, and all others would wait.
        """
        hangs = any(turn.hangs for turn in self.turns.values())
        if not hangs or not Subscriptions(connection.channel).take_back_number(stored):
            return False
        number = counted(stored.partitions, "partition")
        self._failures.warn(f"a call hangs, and the partitions cannot meet meanwhile; there are still {number}")
        return True

    # Errors

    @contextmanager
    def _tried(self, connection: Connection, partition: Partition | None) -> Iterator[None]:
        """Try work for one partition, or for the subscription; after an error that may pass, try again later.

        Raises:
            ConnectionLostError: the connection is lost, so the other partitions of the worker begin again as well.
            Exception: only a person can mend the error, or only a new process.
        """
        tries = self._failures.tries(partition)
        try:
            yield
            return
        except (HungHandlerError, ConnectionLostError):
            raise
        except LeaseLostError as error:
            self._failures.lease_lost(error, tries)
        except Exception as error:
            endless = connection.until == "stopped"
            told = of_other_tables(connection.channel, error)
            self._failures.explain_or_raise(told, tries, connection.channel.database, known=self.known, endless=endless)
            connection.require(error)
        # Declared again before the next try, because somebody may have altered the subscription, or dropped it.
        self._stored = None
        self.look_at = min(self.look_at, tries.again_at)


def _other_tasks(channel: Channel, subscription: Subscription, keep: timedelta | None) -> list[Task]:
    """Return the tasks of the maintenance that concern the log, or other subscriptions."""
    consumer, at, _instance = subscription.name.partition(AT)

    def gone(_base: Position) -> bool:
        drop_gone(channel, consumer + at)
        return False

    # Not at once: where all slept or stood still together for days, each is given time to show that it is there.
    every = upkeep.PRUNE_PROGRESS
    tasks = [Task("instances that are gone", every, time.monotonic() + every, gone)] if at else []
    return tasks if keep is None else [*tasks, retention_task(channel, keep)]


def retention_task(channel: Channel, keep: timedelta) -> Task:
    """Return the task to delete messages older than `keep` that every subscription has passed, a batch at a time."""
    purge = Purge(channel)
    batches = purge.batches(keep)

    def purged(_base: Position) -> bool:
        nonlocal batches
        goes_on = next(batches, None) is not None
        batches = batches if goes_on else purge.batches(keep)
        return goes_on

    return Task("messages past their retention", upkeep.PURGE, time.monotonic(), purged, waits=True)
