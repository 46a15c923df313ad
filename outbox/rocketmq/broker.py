"""The broker of RocketMQ's model: stores half messages and verdicts, each in a transaction of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar

from outbox.errors import DatabaseError, MQClientError, OutboxError, StandbyError, SubscriptionError, VerdictStandsError
from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message
from outbox.model.subscription import Declaration, Start, check_of
from outbox.model.verdict import describe
from outbox.rocketmq.connections import Connections
from outbox.runtime.failpoints import crash_point
from outbox.store.database import Channel, Database, on_channel
from outbox.store.dialects.statements import Script, run
from outbox.store.half_messages.half import Half, Halves
from outbox.store.half_messages.op import Decision, Op, Ops
from outbox.store.half_messages.pending import HalfTransactions
from outbox.store.identity import verify_for_writers
from outbox.store.log.log import Log
from outbox.store.operations.ensure import ensure_outbox
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.writing.bare import BareOutbox

R = TypeVar("R")

# RocketMQ's response codes.
SYSTEM_ERROR, SLAVE_NOT_AVAILABLE = 1, 11
#: The name of a checker in `decided_by` begins with this text.
CHECKER = "check "
#: Seconds between two declarations of a group's check subscription, because a person may have dropped it.
_DECLARE_SECONDS = 60.0


class Broker:
    """Stores half messages and verdicts of one outbox, on its own connections, not those of the application's pool."""

    def __init__(self, outbox: BareOutbox, *, connections: int) -> None:
        self.outbox = outbox
        self.database = outbox.database
        self.ops = Ops(self.database)
        self._halves = Halves(self.database)
        self._connections = Connections(self.database.open, connections, ask=_ask)
        self._declared: dict[str, float] = {}

    def declare(self, group: str, immunity: timedelta) -> None:
        """Declare the group's check subscription; refuse an immunity longer than another producer's."""
        if time.monotonic() - self._declared.get(group, float("-inf")) < _DECLARE_SECONDS:
            return
        self._require_no_transaction()

        def declare(channel: Channel) -> None:
            ensure_outbox(channel, verify=verify_for_writers)
            try:
                start = _start_of(channel, group)
                Subscriptions(channel).declare(declaration_of(group, immunity), start)
            except SubscriptionError as error:
                raise SubscriptionError(
                    f"the producer's transaction_timeout is longer than its group's: {error}"
                ) from error

        self._connections.call(declare)
        self._declared[group] = time.monotonic()

    def prepare(self, half: Half, message: Message, slot: int, headers: str) -> int:
        """Store a half message; return its log id. Raise `VerdictStandsError` if the transaction has a verdict."""
        self._require_no_transaction()
        id = self._run(lambda: self._halves.append(half, message, slot, headers))
        if id is None:
            stands = self.standing(half.transaction)
            raise VerdictStandsError(half.transaction, stands.op or "rollback", "send", stands.by)
        crash_point("half.after_prepare")
        return id

    def prepare_only(self, half: Half, message: Message, slot: int, headers: str) -> bool:
        """Store the only half message of a transaction, once, by a group that is a topic of transactions at fronts.

        Return False if there is no such topic, or if the transaction is another message's.

        Raise `VerdictStandsError` if the transaction of this message was rolled back.
        """
        self._require_no_transaction()
        id = self._run(lambda: self._halves.append(half, message, slot, headers, only=True))
        crash_point("half.after_prepare")
        if id is not None:
            return True
        if not self._connections.call(lambda channel: run(on_channel(channel), self._halves.has(half, message))):
            return False
        stands = self.standing(half.transaction)
        if stands.op == "rollback":
            raise VerdictStandsError(half.transaction, stands.op, "send", stands.by)
        return True

    def end(
        self,
        transaction: str,
        op: Op,
        *,
        by: str,
        group: str | None = None,
        patience: float | None = None,
        asked: int | None = None,
    ) -> bool:
        """Write the verdict, unless it stands already; return whether it is new.

        If a commit stands whose messages were not appended, append them. `asked`: as in `Ops.commit`. `patience`:
        seconds to wait for a business transaction that is deciding; None: as long as any statement waits for a lock.
        """
        self._require_no_transaction()
        commit = self.ops.commit_alone if patience is None else self.ops.commit
        decide = partial(commit, asked=asked) if op == "commit" else self.ops.roll_back
        crash_point("half.before_end")
        decision = self._run(lambda: decide(transaction, by=by, group=group), patience)
        crash_point("half.after_end")
        if decision.restored:
            self.outbox.notifier.hint()
        require(decision, transaction, op, group)
        if decision.unrestored:
            self.restore(transaction)
        return decision.first

    def restore(self, transaction: str) -> None:
        """Append the messages of a committed transaction, unless they were appended before."""
        self._require_no_transaction()
        with in_plain_words(f"the messages of transaction {transaction} were perhaps not restored", self.database):
            restored = self._run(lambda: self.ops.restore(transaction), chained=False)
        if restored:
            self.outbox.notifier.hint()

    def standing(self, transaction: str) -> Decision:
        """Return the decision that stands, without `op` if there is no verdict."""
        with in_plain_words(f"the verdict on transaction {transaction} cannot be read", self.database):
            return self._connections.call(lambda channel: run(on_channel(channel), self.ops.standing(transaction)))

    def call(self, do: Callable[[Channel], R]) -> R:
        """Call a function with a connection, as `Connections.call` does."""
        return self._connections.call(do)

    def close(self) -> None:
        """Close the connections; a later call opens others."""
        self._connections.close()

    def _require_no_transaction(self) -> None:
        """Raise if this thread has a transaction open for which the call would wait for ever."""
        if self.database.dialect.locks.waits_for_itself(self.database.engine):
            raise DatabaseError(
                "a half message or a verdict is committed on its own, and SQLite has one writer at a time, here the"
                " open transaction of this thread: send half messages before the business transaction begins, and end"
                " transactions after it; or join(session) in it"
            )

    def _run(self, steps: Callable[[], Script[R]], patience: float | None = None, *, chained: bool = True) -> R:
        """Run the steps in a transaction of their own.

        `chained`: no step but the last needs rows of an earlier step, so all may be sent as one.
        """

        def take(channel: Channel) -> R:
            if self.database.dialect.driving.sends_together and patience is None and chained:
                return run(on_channel(channel), steps())
            with channel.transaction(patience=patience):
                return run(on_channel(channel), steps())

        return self._connections.call(take)


def _ask(channel: Channel) -> None:
    """Raise if a connection is lost; raise in RocketMQ's words if the server is a replica."""
    try:
        Log().now(channel)
    except StandbyError as error:
        raise MQClientError("SLAVE_NOT_AVAILABLE", SLAVE_NOT_AVAILABLE) from error


def declaration_of(group: str, immunity: timedelta) -> Declaration:
    """Return the subscription that checks back on the transactions of a group."""
    name = check_of(group)
    return Declaration(name=name, kind="check", destination=name, topics=(HALF_TOPIC,), tags=(group,), grace=immunity)


def _start_of(channel: Channel, group: str) -> Start:
    """Return where a new check subscription begins.

    A person may have dropped an older subscription: if transactions are pending, begin at the earliest message.
    """
    if Subscriptions(channel).find(check_of(group)) is not None:
        # An existing subscription needs no start, and the look below may read every half message of the log.
        return "latest"
    return "earliest" if HalfTransactions(channel).pending(group=group, limit=1) else "latest"


@contextmanager
def in_plain_words(failure: str, *databases: Database) -> Iterator[None]:
    """Raise an error of a driver as a `DatabaseError` whose text begins with `failure`."""
    try:
        yield
    except OutboxError:
        raise
    except Exception as error:
        raise DatabaseError(f"{failure}: {why(error, *databases)}") from error


def why(error: Exception, *databases: Database) -> str:
    """Return the reason for an error of a driver."""
    if any(database.locked(error) for database in databases):
        return "another transaction is deciding, or keeps the database busy, and has not ended; try again"
    return describe(error)


def require(decision: Decision, transaction: str, op: Op, group: str | None = None) -> None:
    """Raise unless this verdict stands, in a transaction of the group."""
    if group is not None and decision.group is not None and decision.group != group:
        raise MQClientError("The producer group wrong", SYSTEM_ERROR)
    if decision.op is None:
        raise MQClientError("Find prepared transaction message failed", SYSTEM_ERROR)
    if decision.op != op:
        raise VerdictStandsError(transaction, decision.op, op, decision.by)
