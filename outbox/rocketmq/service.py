"""The check service: a worker whose subscriptions hold the half messages of producer groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from outbox.model.retry import RetryPolicy
from outbox.rocketmq.broker import Broker, declaration_of
from outbox.rocketmq.business import Business
from outbox.rocketmq.checker import MOST_CALLS, Checker, CheckPolicy
from outbox.rocketmq.connections import Connections
from outbox.rocketmq.listener import Question
from outbox.runtime.stop import Stop
from outbox.store.log.log import Limits
from outbox.worker.calls import Caller
from outbox.worker.deferral import Deferral
from outbox.worker.job import Job
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings, Until
from outbox.worker.worker import Worker

#: The most half messages that are checked together.
_ROWS = 200
#: The deadline of one check, in time limits of a question: two rounds of questions, and some time for the database.
_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedGroup:
    """A producer group whose transactions are asked about. `question`, `business`: who may know their outcome."""

    name: str
    policy: CheckPolicy
    question: Question | None
    business: Business | None = None


class CheckService:
    """Asks about the transactions of groups: one thread, and at most three connections, however many groups.

    Of all processes that run the service for a group, one works for the group at a time.
    """

    @classmethod
    def of(
        cls,
        broker: Broker,
        group: str,
        policy: CheckPolicy,
        question: Question | None,
        business: Business | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Return the service of one group."""
        return cls(broker, [CheckedGroup(name=group, policy=policy, question=question, business=business)], settings)

    def __init__(self, broker: Broker, groups: Sequence[CheckedGroup], settings: Settings | None = None) -> None:
        """`groups`: one at least, each with a name of its own."""
        # One call at a time, because a call of each group would need a connection of its own.
        self._caller, self._connections = Caller(), Connections(broker.database.open, MOST_CALLS)
        jobs = [self._job(broker, group) for group in groups]
        #: The name of the subscription, or of the first of several.
        self.name = jobs[0].declared.name
        self._stop = Stop()
        pace = settings or Settings(limits=Limits(rows=_ROWS))
        self._worker = Worker(broker.database, jobs, pace, stop=self._stop, listeners=broker.outbox.listeners)

    def _job(self, broker: Broker, group: CheckedGroup) -> Job:
        policy = group.policy
        declared = declaration_of(group.name, policy.transaction_timeout)
        deferral = Deferral(declared.name)
        checker = Checker(
            broker,
            group.name,
            policy,
            group.question,
            group.business,
            at_a_loss=deferral.ask,
            connections=self._connections,
        )
        return Job(
            declared=declared,
            handler=checker.check,
            caller=self._caller,
            policy=HandlerPolicy(
                retry=RetryPolicy(attempts=policy.check_max),
                deadline=policy.check_timeout * _ROUNDS,
                least=policy.threads,
            ),
            start="latest",
            deferral=deferral,
        )

    @property
    def stopping(self) -> bool:
        """True from when a stop is asked until the service has stopped."""
        return self._stop.asked

    def work(self, until: Until, stop: Stop) -> None:
        """Check until a stop is asked, or until nothing is due; then close the connections."""
        with self._stop.within(stop):
            try:
                self._worker.work("stopped" if until == "stopped" else "empty")
            finally:
                self.close()

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()
