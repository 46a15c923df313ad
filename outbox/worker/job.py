"""A job: what a worker is to do for one subscription."""

from __future__ import annotations

from dataclasses import dataclass, field

from outbox.model.subscription import Declaration, Start
from outbox.worker.calls import Caller
from outbox.worker.deferral import Deferral
from outbox.worker.policy import HandlerPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A subscription, and how its messages are handled.

    `caller`: calls the handler; jobs with the same handler have the same caller. `start`: where a new subscription
    begins; None: somebody else creates it, and what goes wrong with it does not end the worker. `deferral`: what the
    handler asks to leave the lease to other processes.
    """

    declared: Declaration
    caller: Caller
    policy: HandlerPolicy = field(default_factory=HandlerPolicy)
    start: Start | None = "earliest"
    deferral: Deferral | None = None
