"""Check-back: finds out the outcome of transactions that nobody has ended."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from outbox.model.message import Message
from outbox.model.verdict import DONE, Reject, Retry, Verdict, describe
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.business import PATIENCE_SECONDS, Business, Elsewhere
from outbox.rocketmq.connections import Connections
from outbox.rocketmq.listener import Question, knows
from outbox.rocketmq.questions import Answer, Hanging, Respondent, Unasked, ask_all
from outbox.rocketmq.states import NobodyAsked, op_of
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.runtime.throttled_log import ThrottledLog
from outbox.store.database import Channel, on_channel
from outbox.store.dialects.statements import run
from outbox.store.half_messages.half import REAL_TOPIC, Half, Way, half_of, real_message
from outbox.store.half_messages.op import DecidedHalves, Op, Pending

logger = logging.getLogger("outbox")

#: Added to the wait for the end of an immunity, because a transaction of exactly that age is still immune.
_TICK = timedelta(milliseconds=1)
_AGAIN = timedelta(seconds=1)
#: Answers for transactions whose outcome this process cannot find out.
NO_LISTENER = "no listener here"
NOT_KNOWN = "the listener here does not know the topic (known_topics)"
NO_BUSINESS = "the business database is not known here: business=… (or --business) is missing"
#: Why another process of the group may find out more than this process.
_LACKING = "transactions wait for a listener or a business database that this process does not have"
#: More calls than this never overlap: a worker makes no other one while eight of its calls hang.
MOST_CALLS = 10
#: The pause between two questions is longer than the interval by up to this part, at random.
_JITTER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPolicy:
    """The times and limits of check-back, by the clock of the database; the defaults are RocketMQ's.

    Args:
        transaction_timeout: no transaction is asked about before this age (transactionTimeOut).
        check_interval: the pause between two questions about a transaction (transactionCheckInterval).
        check_max: after so many UNKNOWNs a transaction is given up, and waits for a person (transactionCheckMax).
        age_limit: beyond this age (fileReservedTime) a transaction is given up too, unless a database knows its
            outcome.
        check_timeout: the time limit of one question, and of one look into a business database; a later answer counts
            as UNKNOWN.
        threads: the most questions at once.

    Raises:
        TypeError: a time is no timedelta.
        ValueError: a value is too small.
    """

    transaction_timeout: timedelta = timedelta(seconds=6)
    check_interval: timedelta = timedelta(seconds=30)
    check_max: int = 15
    age_limit: timedelta = timedelta(hours=72)
    check_timeout: timedelta = timedelta(seconds=5)
    threads: int = 4

    def __post_init__(self) -> None:
        least = {"transaction_timeout": timedelta(0)}
        for name in ("transaction_timeout", "check_interval", "age_limit", "check_timeout"):
            time = getattr(self, name)
            if not isinstance(time, timedelta):
                raise TypeError(f"{name} is a timedelta, not {type(time).__name__}: timedelta(seconds=…)")
            if time < least.get(name, timedelta.resolution):
                raise ValueError(f"{name} must be greater than 0, not {time}")
        for name in ("check_max", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class Checker:
    """Handles half messages: finds the verdict on their transactions, or says when to ask again.

    A call past its deadline goes on beside the next call. Each call has a connection of its own, because on a common
    connection the second transaction would be a part of the first, and be taken back with it.
    """

    def __init__(
        self,
        broker: Broker,
        group: str,
        policy: CheckPolicy,
        question: Question | None,
        business: Business | None = None,
        *,
        spread: Callable[[], float] = random.random,
        at_a_loss: Callable[[str], None] = lambda _why: None,
        connections: Connections | None = None,
    ) -> None:
        """`spread`: returns numbers from 0 to 1, by which questions are spread. `at_a_loss`: called with the reason
        why only another process can find out the outcome of a transaction. `connections`: shared with others.
        """
        self._broker = broker
        self._group = group
        self._policy = policy
        self._spread = spread
        self._at_a_loss = at_a_loss
        self._connections = connections or Connections(broker.database.open, MOST_CALLS)
        self._question = question
        self._seconds = policy.check_timeout.total_seconds()
        #: Who is asked, by the way to the verdict.
        self._respondents: dict[Way, Respondent] = {}
        if question is not None:
            self._respondents["listener"] = Respondent(
                lambda row: question(real_message(row)), threads=policy.threads, seconds=self._seconds
            )
        if business is not None:
            # One look at a time: while one hangs, a second one would hang as well.
            self._respondents["record"] = Respondent(
                lambda row: business.outcome(half_of(row)), threads=1, seconds=self._seconds
            )
        # Calls that overlap share these two: at worst a line is logged twice.
        self._logged: set[str] = set()
        self._hanging_log: dict[Way, ThrottledLog] = {way: ThrottledLog(logger) for way in self._respondents}

    def check(self, rows: Sequence[Message]) -> list[Verdict]:
        """Find out the outcome of the transactions of half messages; return a verdict for each row."""
        try:
            with self._connections.one() as channel:
                return self._check(channel, rows)
        except Exception as error:
            # The fault is the database's or ours, so nothing is counted against a transaction.
            self.close()
            logger.warning("check-back failed, trying again: %s", describe(error))
            return [self._later(describe(error), _AGAIN) for _ in rows]

    def close(self) -> None:
        """Close the connections; a later call opens others."""
        self._connections.close()

    def _check(self, channel: Channel, rows: Sequence[Message]) -> list[Verdict]:
        # In the order of their oldest messages, because messages are restored in the order of the verdicts.
        heads: dict[str, Message] = {}
        for row in rows:
            heads.setdefault(row.key or "", row)
        halves, unreadable = _read(heads)
        heads = {transaction: heads[transaction] for transaction in halves}
        pending = DecidedHalves(channel).pending(heads, self._policy.transaction_timeout)
        answers = self._ask([row for key, row in heads.items() if self._is_due(halves[key], pending.get(key))])
        until = clock() + self._seconds
        verdicts = {
            transaction: self._verdict(channel, half, pending.get(transaction), answers.get(transaction), until)
            for transaction, half in halves.items()
        }
        self._read_back(channel, verdicts, pending)
        verdicts |= unreadable
        return [verdicts[row.key or ""] for row in rows]

    def _is_due(self, half: Half, pending: Pending | None) -> bool:
        if pending is None or pending.op is not None or pending.immune_for >= timedelta(0):
            return False
        # A database knows the outcome at any age, so its answer counts beyond the age limit, too.
        return half.way != "listener" or pending.age <= self._policy.age_limit

    def _ask(self, rows: Sequence[Message]) -> Mapping[str | None, Answer | Unasked]:
        """Ask the listener and the business database about transactions, both at the same time."""
        asked = [(row, half_of(row).way) for row in rows if self._knows(row)]
        questions = [(row, self._respondents[way]) for row, way in asked if way in self._respondents]
        answers = ask_all(questions, seconds=self._seconds)
        for way in {way for _, way in asked if way in self._respondents}:
            hanging = self._respondents[way].hanging()
            if hanging is not None:
                self._tell(way, hanging)
        return answers

    def _knows(self, row: Message) -> bool:
        """Return whether the listener here may be asked about a transaction, as far as its topic says."""
        if self._question is None or half_of(row).way != "listener":
            return True
        return knows(self._question, (row.headers or {}).get(REAL_TOPIC, ""))

    def _tell(self, way: Way, hanging: Hanging) -> None:
        """Warn of questions that hang; if they leave no thread free, let another process of the group ask."""
        oldest = f"for {hanging.seconds:.1f} s (transaction {hanging.transaction})"
        if way == "record":
            text = f"the business database has not answered {oldest}; its transactions wait, others go on"
        else:
            rest = (
                "no other is asked here until one of them returns, or this process is started again"
                if hanging.all_threads
                else "others are asked by the other threads"
            )
            number = f"{hanging.number} of {self._policy.threads} questions"
            text = f"{number} to the listener hang, the oldest {oldest}; {rest}"
        self._hanging_log[way].warning("check:%s: %s", self._group, text)
        if way == "listener" and hanging.all_threads:
            self._at_a_loss("the questions to the listener of this process hang")

    def _verdict(
        self, channel: Channel, half: Half, pending: Pending | None, answer: Answer | Unasked | None, until: float
    ) -> Verdict:
        """Return the verdict on the half messages of a transaction. `until`: when to begin no more waits for locks."""
        if pending is not None and pending.unrestored:
            # No immunity and no age limit, because the verdict stands.
            return self._restored(channel, half.transaction, until)
        if pending is None or pending.op is not None:
            return DONE
        if pending.immune_for >= timedelta(0):
            return Retry("immune", pending.immune_for + _TICK, counts=False)
        if half.way == "listener" and not self._is_due(half, pending):
            return self._given_up()
        found = self._found(channel, half, answer, until)
        return self._given_up() if pending.age > self._policy.age_limit and found is not DONE else found

    def _found(self, channel: Channel, half: Half, answer: Answer | Unasked | None, until: float) -> Verdict:
        """Write the verdict on a transaction if it is found; else return when to look again."""
        # Only a listener is at fault itself: a database that hangs uses no try of its transactions up.
        if answer is Unasked.HANGS and half.way == "listener":
            return self._unknown(answer.value)
        if isinstance(answer, Unasked):
            return self._later(answer.value, _AGAIN if answer is Unasked.NO_TIME else None)
        if half.way == "listener":
            return self._by_listener(channel, half.transaction, answer)
        if half.way == "record":
            return self._by_record(channel, half.transaction, answer)
        if clock() > until:
            # Many business transactions are under way, and the looks before waited for each of them.
            return self._later(Unasked.NO_TIME.value, _AGAIN)
        # A business transaction writes the op as its first statement. Without one a rollback fences the business off.
        return self._decided(channel, half.transaction, "rollback")

    def _by_listener(self, channel: Channel, transaction: str, answer: Answer | None) -> Verdict:
        if answer is None:
            self._at_a_loss(_LACKING)
            return self._later(NO_LISTENER if self._question is None else NOT_KNOWN)
        if answer.raised:
            logger.warning("the check of transaction %s raised %s", transaction, answer.reason)
        if isinstance(answer.returned, NobodyAsked):
            self._at_a_loss(answer.returned.reason)
            return self._later(answer.returned.reason)
        op = op_of(answer.returned)
        if op is None:
            return self._unknown(answer.reason)
        return self._decided(channel, transaction, op, asked=answer.times)

    def _by_record(self, channel: Channel, transaction: str, answer: Answer | None) -> Verdict:
        if answer is None:
            self._at_a_loss(_LACKING)
            return self._later(NO_BUSINESS)
        match answer.returned:
            case Elsewhere(mismatch):
                # Only the first transaction of each other business database, because there may be very many.
                if mismatch not in self._logged:
                    self._logged.add(mismatch)
                    logger.warning("transaction %s: %s", transaction, mismatch)
                self._at_a_loss(_LACKING)
                return self._later(mismatch)
            case "commit" | "rollback" as op:
                return self._decided(channel, transaction, op)
            case _:
                return self._later(f"the business database does not say: {answer.reason}")

    def _decided(self, channel: Channel, transaction: str, op: Op, *, asked: int | None = None) -> Verdict:
        """Write the verdict. Wait briefly for a business transaction that is deciding; then try again later.

        `asked`: as in `Ops.commit`.
        """
        ops = self._broker.ops
        decide = partial(ops.commit, asked=asked) if op == "commit" else ops.roll_back
        crash_point("check.before_end")
        try:
            with channel.transaction(patience=PATIENCE_SECONDS):
                decision = run(on_channel(channel), decide(transaction, by=f"check {self._group}"))
                crash_point("check.in_end")
        except Exception as error:
            return self._not_written(transaction, f"its verdict {op} cannot be written", error)
        crash_point("check.after_end")
        if decision.restored:
            self._broker.outbox.notifier.hint()
        if decision.op not in (op, None):
            logger.warning("transaction %s: the answer was %s, but %s stands", transaction, op, decision.op)
        return DONE

    def _restored(self, channel: Channel, transaction: str, until: float) -> Verdict:
        """Append the messages of a business transaction whose commit nobody saw, and whose process may be dead."""
        if clock() > until:
            return self._later(Unasked.NO_TIME.value, _AGAIN)
        try:
            with channel.transaction(patience=PATIENCE_SECONDS):
                restored = run(on_channel(channel), self._broker.ops.restore(transaction))
        except Exception as error:
            return self._not_written(transaction, "its messages cannot be restored", error)
        if restored:
            self._broker.outbox.notifier.hint()
        return DONE

    def _not_written(self, transaction: str, what: str, error: Exception) -> Verdict:
        if self._broker.database.transient(error):
            return self._later("its business transaction is under way")
        # As when a trigger refuses a message: no other transaction waits.
        logger.warning("transaction %s: %s: %s", transaction, what, describe(error))
        return self._later(describe(error))

    def _read_back(self, channel: Channel, verdicts: dict[str, Verdict], pending: Mapping[str, Pending]) -> None:
        """Take back each `Done` whose verdict is not committed, because nobody looks at a done message again."""
        written = [key for key, verdict in verdicts.items() if verdict is DONE and _is_open(pending.get(key))]
        if not written:
            return
        now = DecidedHalves(channel).pending(written, self._policy.transaction_timeout)
        for transaction in written:
            if _is_open(now.get(transaction)):
                verdicts[transaction] = self._later("its verdict or its messages are not there yet", _AGAIN)

    def _given_up(self) -> Reject:
        return Reject(f"given up: older than {self._policy.age_limit}")

    def _unknown(self, why: str) -> Retry:
        """Return a retry that counts as an UNKNOWN."""
        return Retry(why, self._policy.check_interval * (1 + _JITTER * self._spread()))

    def _later(self, why: str, after: timedelta | None = None) -> Retry:
        """Return a retry that does not count as an UNKNOWN, because nobody was asked."""
        return Retry(why, self._policy.check_interval if after is None else after, counts=False)


def _read(heads: Mapping[str, Message]) -> tuple[dict[str, Half], dict[str, Verdict]]:
    """Return the facts about each transaction; and a verdict for half messages of another hand, which have none."""
    halves: dict[str, Half] = {}
    unreadable: dict[str, Verdict] = {}
    for transaction, row in heads.items():
        try:
            halves[transaction] = half_of(row)
        except Exception as error:
            unreadable[transaction] = Reject(f"not a half message of a producer: {describe(error)}")
    return halves, unreadable


def _is_open(pending: Pending | None) -> bool:
    """Return whether a transaction has half messages, and no verdict or messages to restore."""
    return pending is not None and (pending.op is None or pending.unrestored)
