"""The check service: a worker whose subscription holds the half messages of a producer group."""

from __future__ import annotations

import logging
import math
import threading

from outbox.model.retry import RetryPolicy
from outbox.relay.restarts import Supervision
from outbox.rocketmq.broker import Broker, declaration_of
from outbox.rocketmq.business import Business
from outbox.rocketmq.checker import Checker, CheckPolicy
from outbox.rocketmq.listener import Question
from outbox.runtime.clock import clock
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
        self._worker = Worker(
            broker.database,
            declaration_of(group, policy.transaction_timeout),
            self._checker.check,
            start="latest",
            policy=HandlerPolicy(
                retry=RetryPolicy(attempts=policy.most), deadline=policy.question * _ROUNDS, least=policy.threads
            ),
            settings=settings or Settings(limits=Limits(rows=_ROWS)),
        )
        self._group = group
        self._name = f"outbox-check-{group}"
        self._stopped = False
        #: `_endless`: `run` goes on until it is stopped. `_aside`: the lease is given back for a while.
        self._endless = self._aside = False
        self._turn_ends = -math.inf
        #: The reasons for leaving the lease to others that were logged as a warning.
        self._logged: set[str] = set()
        self._supervision: Supervision | None = None
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Check until stopped."""
        self._endless, self._aside = True, False
        try:
            self._worker.run()
            while self._aside:
                self._rest_aside()
                if self._stopped:
                    break
                self._worker.run()
        finally:
            self._endless = False
            self._checker.close()

    def _step_aside(self, why: str) -> None:
        """Give the lease back for a while, because another process of the group may find out what this one cannot."""
        if self._endless and not self._aside and clock() >= self._turn_ends:
            logger.log(
                logging.DEBUG if why in self._logged else logging.WARNING,
                "check:%s: %s; others are let go first for %g s",
                self._group,
                why,
                _ASIDE_SECONDS,
            )
            self._logged.add(why)
            self._aside = True
            self._worker.stop()

    def _rest_aside(self) -> None:
        """Leave the lease to others for a while."""
        self._worker.reset()
        if not self._stopped:
            self._worker.rest(_ASIDE_SECONDS)
        self._turn_ends = clock() + _TURN_SECONDS
        # Last, because a call that comes back meanwhile would end the next turn before it begins.
        self._aside = False

    def once(self) -> None:
        """Check everything that is due, then return."""
        try:
            self._worker.until_empty()
        finally:
            self._checker.close()

    def start(self) -> None:
        """Run in a thread of this process until `stop`. Log each failure, and try again after it."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopped = False
        self._worker.reset()
        self._supervision = Supervision(self.run, name="the check")
        self._thread = threading.Thread(target=self._supervision.run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Let the check under way finish, then end. Wait for the thread of `start`, for at most `timeout` seconds."""
        self._stopped = True
        if self._supervision is not None:
            self._supervision.stop()
        self._worker.stop()
        if self._thread is not None:
            self._thread.join(timeout)
