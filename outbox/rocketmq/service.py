"""The check service: a worker whose subscription holds the half messages of a producer group."""

from __future__ import annotations

import logging
import math

from outbox.model.retry import RetryPolicy
from outbox.model.subscription import check_of
from outbox.relay.supervisor import Until
from outbox.rocketmq.broker import Broker, declaration_of
from outbox.rocketmq.business import Business
from outbox.rocketmq.checker import Checker, CheckPolicy
from outbox.rocketmq.listener import Question
from outbox.runtime.clock import clock
from outbox.runtime.stop import Stop
from outbox.store.log.limits import Limits
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings
from outbox.worker.worker import Worker

logger = logging.getLogger("outbox")

#: Seconds for which the lease is left to others: longer than a worker that stands by needs to take it.
_ASIDE_SECONDS = 2.0
#: Seconds for which this process works at least before it leaves the lease to others again: it still has transactions
#: that are decided without what it lacks.
_TURN_SECONDS = 5.0
#: The most half messages that are checked together.
_ROWS = 200
#: The deadline of one check, in time limits of a question: two rounds of questions, and some time for the database.
_ROUNDS = 4


class CheckService:
    """Asks what became of a group's transactions. Of all processes that run it, one works at a time."""

    def __init__(
        self,
        broker: Broker,
        group: str,
        policy: CheckPolicy,
        question: Question | None,
        business: Business | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._checker = Checker(broker, group, policy, question, business, at_a_loss=self._step_aside)
        self._stop = Stop()
        self._worker = Worker(
            broker.database,
            declaration_of(group, policy.transaction_timeout),
            self._checker.check,
            start="latest",
            policy=HandlerPolicy(
                retry=RetryPolicy(attempts=policy.most), deadline=policy.question * _ROUNDS, least=policy.threads
            ),
            settings=settings or Settings(limits=Limits(rows=_ROWS)),
            stop=self._stop,
        )
        #: The name of its subscription.
        self.name = check_of(group)
        #: `_endless`: it goes on until it is stopped. `_aside`: the lease is given back for a while.
        self._endless = self._aside = False
        self._turn_ends = -math.inf
        #: The reasons for leaving the lease to others that were logged as a warning.
        self._logged: set[str] = set()

    @property
    def stopping(self) -> bool:
        """True from when a stop is asked until it has stopped."""
        return self._stop.asked

    def work(self, until: Until, stop: Stop) -> None:
        """Check until a stop is asked, or only what is due. It holds no connections after that."""
        with self._stop.within(stop):
            try:
                if until == "stopped":
                    self._run()
                else:
                    self._worker.until_empty()
            finally:
                self.close()

    def close(self) -> None:
        """Close the connections."""
        self._checker.close()

    def _run(self) -> None:
        self._endless, self._aside = True, False
        try:
            self._worker.run()
            while self._aside:
                self._rest_aside()
                if self._stop.asked:
                    break
                self._worker.run()
        finally:
            self._endless = False

    def _step_aside(self, why: str) -> None:
        """Give the lease back for a while, because another process of the group may find out what this one cannot."""
        if self._endless and not self._aside and clock() >= self._turn_ends:
            logger.log(
                logging.DEBUG if why in self._logged else logging.WARNING,
                "%s: %s; others are let go first for %g s",
                self.name,
                why,
                _ASIDE_SECONDS,
            )
            self._logged.add(why)
            self._aside = True
            self._worker.stop()

    def _rest_aside(self) -> None:
        """Leave the lease to others for a while."""
        self._worker.reset()
        self._worker.rest(_ASIDE_SECONDS)
        self._turn_ends = clock() + _TURN_SECONDS
        # Last, because a call that comes back meanwhile would end the next turn before it begins.
        self._aside = False
