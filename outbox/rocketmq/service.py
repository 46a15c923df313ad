"""The check service: one more worker, whose subscription holds the half messages of a producer group."""

from __future__ import annotations

import logging
import threading

from outbox.model.verdict import RetryPolicy
from outbox.relay.supervision import Supervision
from outbox.rocketmq.broker import Broker, declaration_of
from outbox.rocketmq.business import Business
from outbox.rocketmq.checker import Checker, CheckPolicy
from outbox.rocketmq.listener import Question
from outbox.store.log.log import Limits
from outbox.worker.handle import HandlerPolicy
from outbox.worker.settings import Settings
from outbox.worker.worker import Worker

logger = logging.getLogger("outbox")

#: Longer than a worker that stands by needs to take a lease that was given back.
_ASIDE_SECONDS = 2.0
#: So many half messages are looked at together.
_ROWS = 200
#: A look takes what two rounds of questions may take, and some time for the database.
_ROUNDS = 4


class CheckService:
    """Asks what became of a group's transactions, in one process of all that run it at a time."""

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
            policy=HandlerPolicy(retry=RetryPolicy(attempts=policy.most), deadline=policy.question * _ROUNDS),
            settings=settings or Settings(limits=Limits(rows=_ROWS)),
        )
        self._group = group
        self._name = f"outbox-check-{group}"
        self._stopped = False
        #: Whether it goes on until it is stopped, and whether it lets others have their turn first.
        self._endless = self._aside = False
        #: That it lacks something is news once.
        self._log_level = logging.WARNING
        self._supervision: Supervision | None = None
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Check until stopped."""
        self._endless, go_on = True, True
        try:
            while go_on:
                self._worker.run(gives_up=False)
                go_on = self._aside and self._rest_aside()
        finally:
            self._endless = False
            self._checker.close()

    def _step_aside(self) -> None:
        """Give the lease back for a while: another process of the group may have the listener, or the business
        database, that this one lacks.
        """
        if self._endless and not self._aside:
            level, self._log_level = self._log_level, logging.DEBUG
            logger.log(
                level,
                "check:%s: transactions wait for a listener or a business database that this process does not have;"
                " others are let go first for %g s",
                self._group,
                _ASIDE_SECONDS,
            )
            self._aside = True
            self._worker.stop()

    def _rest_aside(self) -> bool:
        """Wait until others had their turn; False when a stop is asked."""
        self._aside = False
        self._worker.reset()
        return not self._stopped and self._worker.rest(_ASIDE_SECONDS)

    def once(self) -> None:
        """Check what is due."""
        try:
            self._worker.until_empty()
        finally:
            self._checker.close()

    def start(self) -> None:
        """Run in a thread of this process, until `stop`; what keeps it from working is logged, and tried again."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopped = False
        self._worker.reset()
        self._supervision = Supervision(self.run, name="the check")
        self._thread = threading.Thread(target=self._supervision.run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Finish what is under way."""
        self._stopped = True
        if self._supervision is not None:
            self._supervision.stop()
        self._worker.stop()
        if self._thread is not None:
            self._thread.join(timeout)
