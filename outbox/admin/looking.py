"""Questions about a whole outbox: its state and problems, its past, its workers, its tables."""

from __future__ import annotations

from datetime import timedelta

from outbox.admin.diagnosis import STALLED_SECONDS, Diagnosis
from outbox.admin.face import Face, awaited
from outbox.admin.results import Finding, Look, Thresholds
from outbox.model.status import History, Status, WorkerStatus
from outbox.model.subscription import subscription_of
from outbox.store.dialects.finding import Finding as Defect
from outbox.store.operations.check import findings
from outbox.store.operations.half_status import transactions
from outbox.store.operations.history import history, require_steps
from outbox.store.operations.log_status import log_status
from outbox.store.operations.status import statuses, unread
from outbox.store.operations.worker_status import workers
from outbox.store.subscriptions.decisions import stalled
from outbox.store.subscriptions.notices import refused_workers
from outbox.store.subscriptions.subscriptions import Subscriptions

_DEFAULT = Thresholds()


class Looking(Face):
    """Questions about the state of an outbox."""

    def look(self, thresholds: Thresholds = _DEFAULT) -> Look:
        """Return statuses, findings and transactions at one moment, as `outbox status` shows them.

        Raises:
            SubscriptionError: a subscription with limits of its own is not there.
        """
        with self._channel() as channel:
            for name in thresholds.named:
                # A name that is not there is an error; a backfill ends by itself, and the limit of a monitor stays.
                Subscriptions(channel).get_all(subscription_of(name) or name)
            now, found = statuses(channel)
            diagnosis = Diagnosis(
                now=now,
                statuses=found,
                refused=refused_workers(channel),
                stalled=stalled(channel, STALLED_SECONDS),
                unread=unread(channel, found),
                log=log_status(channel, now),
                commands=channel.database.commands,
                limits=thresholds,
            )
            halves, latencies = transactions(channel, now, found)
            return Look(
                at=now,
                findings=tuple(diagnosis.findings()),
                subscriptions=tuple(found),
                transactions=halves,
                log=diagnosis.log,
                latencies=latencies,
            )

    def statuses(self, name: str | None = None) -> tuple[Status, ...]:
        """Return the status of each subscription, sorted by name: backlog, lag, parked messages, workers, troubles.

        Args:
            name: of one subscription; of a broadcast consumer all instances are meant. None: all subscriptions.

        Raises:
            SubscriptionError: there is no subscription of this name.
        """
        with self._channel() as channel:
            meant = None if name is None else Subscriptions(channel).get_all(name)
            return tuple(statuses(channel, meant)[1])

    def diagnosis(self, thresholds: Thresholds = _DEFAULT) -> tuple[Finding, ...]:
        """Return the problems, each with its begin, evidence and the next command; empty: all is well."""
        return self.look(thresholds).findings

    def history(
        self, name: str, *, since: timedelta = timedelta(hours=1), step: timedelta = timedelta(minutes=1)
    ) -> History:
        """Return lag, messages a second and parked messages of a subscription over time, from the stored settles.

        Args:
            name: of the subscription.
            since: how long ago the first step begins, by the database's clock. Settles are kept for a day.
            step: the length of each step; at most 1 000 steps.

        Raises:
            SubscriptionError: there is no such subscription.
            ValueError: a length of time is no timedelta, or below 1 s, or there are too many steps.
        """
        require_steps(since, step)
        with self._channel() as channel:
            return history(channel, Subscriptions(channel).get(name), since, step)

    def workers(self, name: str | None = None) -> tuple[WorkerStatus, ...]:
        """Return the processes that work for subscriptions, and those that stand by for a share of the partitions.

        Args:
            name: of the subscription; None: all.

        Raises:
            SubscriptionError: there is no such subscription.
        """
        with self._channel() as channel:
            known = Subscriptions(channel)
            return tuple(workers(channel, known.all() if name is None else known.get_all(name)))

    def check(self) -> tuple[Defect, ...]:
        """Return the defects of tables and server, each with its fix, as `outbox doctor` does; empty: none."""
        with self._channel() as channel:
            return tuple(findings(channel))

    alook = awaited(look)
    astatuses = awaited(statuses)
    adiagnosis = awaited(diagnosis)
    ahistory = awaited(history)
    aworkers = awaited(workers)
    acheck = awaited(check)
