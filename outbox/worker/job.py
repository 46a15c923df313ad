"""A job: the work for one subscription."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

from outbox.model.subscription import Declaration, Start, backfill_of
from outbox.worker.calls import Caller, Handler
from outbox.worker.deferral import Deferral
from outbox.worker.policy import HandlerPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A subscription, and how its messages are handled.

    `caller`: makes the calls; jobs for the same destination share a caller. `start`: where a new subscription begins;
    None: another process creates the subscription, and its errors do not end the worker. `deferral`: by which the
    handler leaves the lease to other processes. `keep`: the worker deletes messages that are older, once every
    subscription has passed them; None: none.
    """

    declared: Declaration
    handler: Handler
    caller: Caller = field(default_factory=Caller)
    policy: HandlerPolicy = field(default_factory=HandlerPolicy)
    start: Start | None = "earliest"
    deferral: Deferral | None = None
    keep: timedelta | None = None


def with_followers(job: Job) -> list[Job]:
    """Return the job of a relay or a consumer, and the job of its backfill.

    A command creates a backfill, which the instances of a broadcast consumer do not have.
    """
    own = job.declared
    if own.kind == "broadcast":
        return [job]
    backfill = Declaration(name=backfill_of(own.name), destination=own.destination, kind="backfill")
    return [job, replace(job, declared=backfill, start=None, keep=None)]
