"""Check-back: it finds out what became of transactions that nobody has ended."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Retry, Verdict, describe
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.business import PATIENCE_SECONDS, Business
from outbox.rocketmq.connections import on_channel
from outbox.rocketmq.listener import Question
from outbox.rocketmq.questions import Questions
from outbox.rocketmq.states import op_of
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.store.database import Channel
from outbox.store.dialects.statements import run
from outbox.store.half_messages.half import Half, half_of
from outbox.store.half_messages.op import DecidedHalves, Op, Pending

logger = logging.getLogger("outbox")

#: Added to the wait for the end of an immunity, because a transaction of exactly that age is still immune.
_TICK = timedelta(milliseconds=1)
_AGAIN = timedelta(seconds=1)
#: Answers for transactions about which this process cannot find out anything.
NO_LISTENER = "no listener here"
NO_BUSINESS = "the business database is not known here: business=… (or --business) is missing"
#: The pause between two questions is longer than the interval by a random part of it, up to this one.
_JITTER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPolicy:
    """The times and limits of check-back, by the clock of the database; the defaults are RocketMQ's.

    `transaction_timeout`: no transaction is asked about before this age. `interval`: the pause between two questions.
    `most`: after so many UNKNOWNs the transaction is given up and waits for a person. `age_limit`: beyond this age it
    is given up too, unless a database says what became of it. `question`: the time limit of one question. `threads`:
    the most questions at once.
    """

    transaction_timeout: timedelta = timedelta(seconds=6)
    interval: timedelta = timedelta(seconds=30)
    most: int = 15
    age_limit: timedelta = timedelta(hours=72)
    question: timedelta = timedelta(seconds=5)
    threads: int = 4


class Checker:
    """Handles half messages: finds the verdict on their transactions, or says when to ask again."""

    def __init__(
        self,
        broker: Broker,
        group: str,
        policy: CheckPolicy,
        question: Question | None,
        business: Business | None = None,
        *,
        spread: Callable[[], float] = random.random,
        at_a_loss: Callable[[], None] = lambda: None,
    ) -> None:
        """`spread`: returns numbers from 0 to 1, by which questions are spread. `at_a_loss`: called when there is a
        transaction about which only another process can find out something.
        """
        self._broker = broker
        self._by = f"check {group}"
        self._policy = policy
        self._business = business
        self._questions = (
            None
            if question is None
            else Questions(question, seconds=policy.question.total_seconds(), threads=policy.threads)
        )
        self._spread = spread
        self._at_a_loss = at_a_loss
        self._logged: set[str] = set()
        self._channel: Channel | None = None

    def check(self, rows: Sequence[Message]) -> list[Verdict]:
        """Find out what became of the transactions of these half messages; return one verdict for each row."""
        try:
            return self._check(rows)
        except Exception as error:
            # The fault is the database's or ours, so nothing is counted against a transaction.
            self.close()
            logger.warning("check-back failed, trying again: %s", describe(error))
            return [self._later(describe(error), _AGAIN) for _ in rows]

    def close(self) -> None:
        """Close the connection; a later call opens another one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _check(self, rows: Sequence[Message]) -> list[Verdict]:
        heads = {row.key or "": row for row in reversed(rows)}
        channel = self._open_channel()
        pending = DecidedHalves(channel).pending(heads, self._policy.transaction_timeout)
        verdicts: dict[str, Verdict] = {}
        to_ask: list[Message] = []
        until = clock() + self._policy.question.total_seconds()
        for transaction, row in heads.items():
            if clock() > until:
                # Many business transactions are under way, and the calls before waited for each of them.
                verdicts[transaction] = self._later("there was no time for it", _AGAIN)
                continue
            found = self._without_question(channel, half_of(row), pending.get(transaction))
            if found is None:
                to_ask.append(row)
            else:
                verdicts[transaction] = found
        verdicts |= self._ask(channel, to_ask)
        return [verdicts[row.key or ""] for row in rows]

    def _without_question(self, channel: Channel, half: Half, pending: Pending | None) -> Verdict | None:
        """Return the verdict on a transaction without asking a listener; None if a listener has to be asked."""
        if pending is None or pending.op is not None:
            return DONE
        if pending.immune_for >= timedelta(0):
            return Retry("immune", pending.immune_for + _TICK, counts=False)
        too_old = pending.age > self._policy.age_limit
        found = None if half.way == "listener" else self._by_database(channel, half, pending)
        # A database knows the outcome at any age, so its answer counts beyond the age limit, too.
        return Reject(f"given up: older than {self._policy.age_limit}") if too_old and found is not DONE else found

    def _by_database(self, channel: Channel, half: Half, pending: Pending) -> Verdict:
        """Find out from a database what became of a transaction; if it cannot say yet, return when to look again."""
        if half.way == "record":
            return self._by_record(channel, half)
        left = half.fence_after - pending.age
        if half.way == "commit" and left >= timedelta(0):
            # An absent op says nothing yet, because the business transaction writes it as its last statement.
            return self._later("not committed yet", min(left + _TICK, self._policy.interval))
        return self._fenced(channel, half)

    def _fenced(self, channel: Channel, half: Half) -> Verdict:
        """Roll back a transaction whose op its business transaction writes, unless that is still writing it."""
        return self._decided(channel, half.transaction, "rollback")

    def _by_record(self, channel: Channel, half: Half) -> Verdict:
        if self._business is None:
            self._at_a_loss()
            return self._later(NO_BUSINESS)
        try:
            mismatch = self._business.mismatch(half.recorded_in)
            if mismatch is not None:
                self._log_once(half.transaction, mismatch)
                self._at_a_loss()
                return self._later(mismatch)
            stands = self._business.fence(half.transaction)
        except Exception as error:
            return self._later(f"the business database does not say: {describe(error)}")
        if stands is None:
            return self._later("the business database does not say")
        return self._decided(channel, half.transaction, stands)

    def _log_once(self, transaction: str, mismatch: str) -> None:
        """Log only the first transaction of each other business database, because one may have very many."""
        if mismatch not in self._logged:
            self._logged.add(mismatch)
            logger.warning("transaction %s: %s", transaction, mismatch)

    def _ask(self, channel: Channel, rows: list[Message]) -> dict[str, Verdict]:
        """Ask the listener about transactions, several at a time."""
        verdicts: dict[str, Verdict] = {}
        if not rows:
            return verdicts
        if self._questions is None:
            self._at_a_loss()
            return {row.key or "": self._later(NO_LISTENER) for row in rows}
        for row, answer in self._questions.ask(rows):
            transaction = row.key or ""
            if answer is None:
                verdicts[transaction] = self._later("its last question is open still, or too many others are")
                continue
            op = op_of(answer.state)
            if op is None:
                verdicts[transaction] = Retry(answer.reason, self._spaced(self._policy.interval))
            else:
                verdicts[transaction] = self._decided(channel, transaction, op)
        return verdicts

    def _decided(self, channel: Channel, transaction: str, op: Op) -> Verdict:
        """Write the verdict. Wait briefly for a business transaction that is writing one; then try again later."""
        decide = self._broker.ops.commit if op == "commit" else self._broker.ops.roll_back
        crash_point("check.before_end")
        try:
            with channel.transaction(patience=PATIENCE_SECONDS):
                decision = run(on_channel(channel), decide(transaction, by=self._by))
        except Exception as error:
            if not self._broker.database.transient(error):
                raise
            return self._later("its business transaction is under way")
        crash_point("check.after_end")
        if decision.restored:
            self._broker.outbox.notifier.hint()
        if decision.op not in (op, None):
            logger.warning("transaction %s: the answer was %s, but %s stands", transaction, op, decision.op)
        return DONE

    def _later(self, why: str, after: timedelta | None = None) -> Retry:
        """Return a retry that does not count as an UNKNOWN, because nobody was asked."""
        return Retry(why, self._policy.interval if after is None else after, counts=False)

    def _spaced(self, interval: timedelta) -> timedelta:
        return interval * (1 + _JITTER * self._spread())

    def _open_channel(self) -> Channel:
        if self._channel is None:
            self._channel = self._broker.database.open()
        return self._channel
