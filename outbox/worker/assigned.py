"""A partition that is assigned to a worker: each part of the work takes from it what the part needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outbox.model.lease import Partition
from outbox.model.subscription import Subscription
from outbox.runtime.wakeup import Wake
from outbox.store.database import Channel
from outbox.store.log.log import Limits
from outbox.telemetry.events import Teller
from outbox.worker.calls import HeldLease
from outbox.worker.hung import HungCalls
from outbox.worker.job import Job
from outbox.worker.outages import Outages
from outbox.worker.pace import Pace
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings, Until
from outbox.worker.settle import Unsettled


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """A partition whose lease was taken.

    `channel`: to work on. `until`: how long the worker works. `wake`: wakes the worker. `subscription`: as stored when
    the lease was taken. `teller`: of the subscription. `hung`, `outages`, `unsettled`: over all leases. `pace`: of
    handing messages over; None: any.
    """

    channel: Channel
    until: Until
    wake: Wake
    held: HeldLease
    subscription: Subscription
    job: Job
    settings: Settings
    teller: Teller
    hung: HungCalls
    outages: Outages
    unsettled: Unsettled
    pace: Pace | None = None

    @property
    def partition(self) -> Partition:
        """The partition of the lease."""
        return self.held.lease.partition

    @property
    def policy(self) -> HandlerPolicy:
        """The rules for failures."""
        return self.job.policy.of(self.subscription)

    @property
    def limits(self) -> Limits:
        """The limits of one read."""
        limits = self.settings.limits
        if self.pace is None or self.subscription.compact:
            # Only within a batch the newest message of a key replaces others.
            return limits
        # What is parked, and what people ask of it, waits for the end of a batch.
        return replace(limits, rows=max(1, min(limits.rows, int(self.pace.rate))))
