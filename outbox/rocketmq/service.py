"""The check service: a worker whose subscription holds the half messages of a producer group."""

from __future__ import annotations

from outbox.model.retry import RetryPolicy
from outbox.rocketmq.broker import Broker, declaration_of
from outbox.rocketmq.business import Business
from outbox.rocketmq.checker import Checker, CheckPolicy
from outbox.rocketmq.listener import Question
from outbox.runtime.stop import Stop
from outbox.store.log.log import Limits
from outbox.worker.deferral import Deferral
from outbox.worker.job import Job
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings, Until
from outbox.worker.worker import Worker

#: The most half messages that are checked together.
_ROWS = 200
#: The deadline of one check, in time limits of a question: two rounds of questions, and some time for the database.
_ROUNDS = 4


class CheckService:
    """Asks about the transactions of a group. Of all processes that run the service, one works at a time."""

    def __init__(
        self,
        broker: Broker,
        group: str,
        policy: CheckPolicy,
        question: Question | None,
        business: Business | None = None,
        settings: Settings | None = None,
    ) -> None:
        declared = declaration_of(group, policy.transaction_timeout)
        #: The name of the subscription.
        self.name = declared.name
        deferral = Deferral(declared.name)
        self._checker = Checker(broker, group, policy, question, business, at_a_loss=deferral.ask)
        self._stop = Stop()
        job = Job(
            declared=declared,
            handler=self._checker.check,
            policy=HandlerPolicy(
                retry=RetryPolicy(attempts=policy.check_max),
                deadline=policy.check_timeout * _ROUNDS,
                least=policy.threads,
            ),
            start="latest",
            deferral=deferral,
        )
        pace = settings or Settings(limits=Limits(rows=_ROWS))
        self._worker = Worker(broker.database, [job], pace, stop=self._stop, listeners=broker.outbox.listeners)

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
        self._checker.close()
