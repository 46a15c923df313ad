"""The check service: a worker whose subscription holds the half messages of a producer group."""

from __future__ import annotations

import threading

from outbox.model.retry import RetryPolicy
from outbox.relay.restarts import Supervision
from outbox.rocketmq.broker import Broker, declaration_of
from outbox.rocketmq.business import Business
from outbox.rocketmq.checker import Checker, CheckPolicy
from outbox.rocketmq.listener import Question
from outbox.store.log.limits import Limits
from outbox.worker.calls import Caller
from outbox.worker.deferral import Deferral
from outbox.worker.job import Job
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings
from outbox.worker.worker import Worker

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
        declared = declaration_of(group, policy.transaction_timeout)
        deferral = Deferral(declared.name)
        self._checker = Checker(broker, group, policy, question, business, at_a_loss=deferral.ask)
        job = Job(
            declared=declared,
            caller=Caller(self._checker.check),
            policy=HandlerPolicy(
                retry=RetryPolicy(attempts=policy.most), deadline=policy.question * _ROUNDS, least=policy.threads
            ),
            start="latest",
            deferral=deferral,
        )
        pace = settings or Settings(limits=Limits(rows=_ROWS))
        self._worker = Worker(broker.database, [job], pace, listeners=broker.outbox.listeners)
        self._name = f"outbox-check-{group}"
        self._supervision: Supervision | None = None
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Check until stopped."""
        try:
            self._worker.run()
        finally:
            self._checker.close()

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
        self._worker.reset()
        self._supervision = Supervision(self.run, name="the check")
        self._thread = threading.Thread(target=self._supervision.run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Let the check under way finish, then end. Wait for the thread of `start`, for at most `timeout` seconds."""
        if self._supervision is not None:
            self._supervision.stop()
        self._worker.stop()
        if self._thread is not None:
            self._thread.join(timeout)
