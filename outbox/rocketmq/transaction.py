"""A transaction with half messages: it stores them, and takes the verdict that delivers or drops their messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outbox.errors import DatabaseError, MQClientError, NoTransactionError, OutboxError, VerdictStandsError
from outbox.model.limits import checked_headers, stored_headers
from outbox.model.message import TRANSACTION_ID, Message, MessageFields, slot_of, traced, uuid7
from outbox.model.trace_context import trace_headers
from outbox.model.verdict import describe
from outbox.rocketmq.broker import CHECKER, Broker, in_plain_words, require, why
from outbox.rocketmq.business import before_commit, or_doomed
from outbox.rocketmq.limits import check_message, immunity_of
from outbox.rocketmq.states import MessageQueue, TransactionResolution
from outbox.store.dialects.statements import executor, run
from outbox.store.half_messages.half import Half, Way
from outbox.store.half_messages.op import Decision, Op
from outbox.writing.handles import is_async
from outbox.writing.transaction import Transactions

if TYPE_CHECKING:
    from outbox.rocketmq.business import Business
    from outbox.writing.handles import DriverConnection, Handle

logger = logging.getLogger("outbox")


class Transaction:
    """Any number of messages that one verdict delivers or drops; made by `TransactionMQProducer.begin_transaction`.

    As a context manager it is committed when the block ends normally, unless a business transaction decides (see
    `verdict`). If the block raises, no verdict is written, because the error may come from a commit whose answer was
    lost. Then check-back decides.

    However a block is left whose transaction was joined, the messages are restored if the business transaction was
    committed in a way that nobody was told of: by the driver's own `commit()`, or by a COMMIT as text.
    """

    def __init__(
        self,
        broker: Broker,
        group: str,
        way: Way,
        *,
        fence_after: timedelta,
        declare: Callable[[], None],
        business: Business | None = None,
        id: str | None = None,
    ) -> None:
        self._broker = broker
        self._declare = declare
        self._business = business
        self._sent: set[UUID] = set()
        #: The messages that a business transaction has restored; None: none has done so yet.
        self._restored: frozenset[UUID] | None = None
        self._half = Half(transaction=str(uuid7()) if id is None else id, group=group, way=way, fence_after=fence_after)
        #: `_ended`: `commit()` or `rollback()` has ended it. `_joined`: `join` or `commit(handle)` has left the verdict
        #: to a business transaction.
        self._ended = self._joined = False
        self._decided: _Decided | None = None

    @property
    def id(self) -> str:
        """The id by which another process may end it: `producer.end_transaction(id, …)`."""
        return self._half.transaction

    @property
    def verdict(self) -> Way:
        """The way to its verdict; see `begin_transaction`."""
        return self._half.way

    # Messages

    def send(self, topic: str, body: object, **fields: Unpack[MessageFields]) -> UUID:
        """Store one more half message; see `Message` for `fields`. Its message is not delivered before the commit.

        A delay counts from the commit. A header `CHECK_IMMUNITY_TIME_IN_SECONDS` says for how long the transaction is
        not asked about.

        Raises:
            MQClientError: RocketMQ would refuse the message, or the transaction is over. "send message Exception": it
                is not sure that the half message was stored, because the database did not answer.
            VerdictStandsError: a checker or another process has ended the transaction; nothing was stored.
            InvalidMessageError: the message is against a limit of the log.
        """
        message = Message(topic, body, **fields)
        self.send_message(message)
        return message.message_id

    def send_message(self, message: Message) -> int:
        """Store a half message for a message that was made before; return its place in the log."""
        place, _ = self.store(message)
        return place

    def store(self, message: Message) -> tuple[int, MessageQueue]:
        """Store a half message; return its place in the log, and the queue to which its message will go."""
        check_message(message)
        if self._ended:
            raise MQClientError(f"transaction {self.id} is over; begin another one")
        if self._decided is not None and self._decided.leaves_behind():
            raise self._left_behind()
        immunity = immunity_of(message)
        own = {**message.headers, TRANSACTION_ID: self.id}
        checked_headers(own)
        headers = stored_headers(traced(own, trace_headers()))
        slot = slot_of(message.key, self._broker.database.slots)
        restored = self._restored
        try:
            half = replace(
                self._half,
                immunity=None if immunity is None else timedelta(seconds=immunity),
                recorded_in=self._recorded_in,
            )
            self._declare()
            place = self._broker.prepare(half, message, slot, headers)
        except OutboxError:
            raise
        except Exception as error:
            raise MQClientError(f"send message Exception: {why(error, self._broker.database)}") from error
        # The id is noted before the look, and a business transaction that restores looks at the ids after it has noted
        # what it has restored. So one of both notices a message that the business, isolated from it, has not restored.
        self._sent.add(message.message_id)
        if self._restored is not restored and message.message_id not in (self._restored or ()):
            raise self._left_behind()
        return place, MessageQueue(message.topic, slot)

    # Verdicts

    def join(self, handle: Handle) -> None:
        """Let a business transaction decide. Call it in that transaction before everything else.

        When the business transaction commits, the messages are delivered; when it rolls back, they are dropped. With
        verdict="record" it is a transaction of the business database; `commit()` after it only makes the delivery
        quicker.

        Args:
            handle: a `Session`, a `scoped_session` or a `Connection`, in no savepoint.

        Raises:
            VerdictStandsError: a checker has decided for a rollback, because no verdict came for too long; or another
                business transaction has committed it. This business transaction cannot be committed any more.
        """
        self._require_sent()
        if self.verdict == "record":
            assert self._business is not None
            transactions = self._business.transactions
            connection = self._outermost(transactions, handle, "join")
            if not self._decides(transactions, connection):
                self._business.join(connection, self.id)
                self._decided = _Decided(transactions, connection)
        elif self.verdict == "join":
            transactions = self._broker.outbox.transactions
            connection = self._outermost(transactions, handle, "join")
            if not self._decides(transactions, connection):
                with or_doomed(transactions, self._broker.ops, connection):
                    self._require_first(
                        connection, run(executor(connection), self._broker.ops.join(self.id, by=self._by))
                    )
                transactions.wrote(connection)
                before_commit(transactions, connection, lambda: self._restore_on(connection))
                self._decided = _Decided(transactions, connection)
        else:
            with_business = ' (or "record", for one of the business database)' if self._business is not None else ""
            raise MQClientError(
                f'this transaction was begun with verdict="{self.verdict}", so no business transaction joins it; begin'
                f' it with verdict="join"{with_business}'
            )
        self._joined = True

    def commit(self, handle: Handle | None = None) -> None:
        """Commit the transaction synchronously, so that its messages are delivered.

        If it is not clear whether a call worked, call it again.

        After a `join` it restores the messages if nobody was told of the business transaction's commit.

        Args:
            handle: the business transaction that the verdict is to be part of, if any. Make this call the last in it.

        Raises:
            VerdictStandsError: it was rolled back before, perhaps by a checker. With a `handle` the business
                transaction cannot be committed any more.
            MQClientError: nothing was sent; or RocketMQ would refuse it.
        """
        self._require_sent()
        if handle is not None:
            self._commit_in(handle)
            self._joined = True
        else:
            self._end("commit")
            self._ended = True

    def rollback(self) -> None:
        """Roll back: the messages are never delivered. Do not call it if the business may still be committed.

        Raises:
            VerdictStandsError: it was committed before.
            MQClientError: nothing was sent; or RocketMQ would refuse it.
        """
        self._require_sent()
        if self._decided is not None and self._decided.is_running():
            raise MQClientError(f"transaction {self.id} is decided by its business transaction: roll that one back")
        self._end("rollback")
        self._ended = True

    @property
    def resolution(self) -> TransactionResolution:
        """The verdict that stands, as read from the database; UNKNOWN if there is none."""
        op = self._broker.standing(self.id).op
        return TransactionResolution.UNKNOWN if op is None else TransactionResolution(op)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._sent or self._ended:
            return
        if kind is not None:
            self._try_to_restore_unseen()
            return
        try:
            self._leave()
        except (VerdictStandsError, MQClientError):
            if not self._was_ended_by_hand():
                raise

    def _leave(self) -> None:
        """End the transaction at the end of its block, unless a business transaction does."""
        if self._joined:
            if self.verdict == "record":
                self._commit_recorded()
            self._restore_unseen()
        elif self.verdict == "listener":
            self.commit()
        else:
            verb = "commit(session)" if self.verdict == "commit" else "join(session)"
            raise MQClientError(
                f"transaction {self.id} was left without a verdict, and will be rolled back: call {verb} in the"
                " business transaction, or rollback()"
            )

    def _was_ended_by_hand(self) -> bool:
        """Return whether somebody has ended it by its id: a program or a person, but not check-back."""
        stands = self._broker.standing(self.id)
        return stands.op is not None and stands.by is not None and not stands.by.startswith(CHECKER)

    # How it is done

    @property
    def _by(self) -> str:
        return _by(self._half.group)

    @property
    def _recorded_in(self) -> str | None:
        return self._business.identity if self.verdict == "record" and self._business is not None else None

    def _end(self, op: Op) -> None:
        end_by_word(self._broker, self._business, self.id, op, group=self._half.group, way=self.verdict)

    def _commit_recorded(self) -> None:
        """Commit after the commit of the business, whose record says what is to be done if a database is away now."""
        try:
            self.commit()
        except DatabaseError as error:
            logger.warning("%s; check-back finds the record", error)

    def _restore_unseen(self) -> None:
        """Restore the messages of a joined business transaction if it was committed and nobody was told of that."""
        if self.verdict != "join" or self._decided is None or self._decided.was_seen_to_commit():
            return
        if self._broker.standing(self.id).unrestored:
            self._broker.restore(self.id)

    def _try_to_restore_unseen(self) -> None:
        """Restore the messages as above; raise nothing, because another error is under way."""
        try:
            self._restore_unseen()
        except Exception as error:
            logger.error(
                "the messages of transaction %s were perhaps not restored, call commit() again: %s",
                self.id,
                describe(error),
            )

    def _left_behind(self) -> MQClientError:
        return MQClientError(
            f"transaction {self.id} was committed in its business transaction, which would leave this message behind;"
            f" send before {'the business transaction begins' if self.verdict == 'join' else 'commit(session)'}"
        )

    def _require_sent(self) -> None:
        if not self._sent:
            raise MQClientError("Transactional message has not been sent yet")

    def _commit_in(self, handle: Handle) -> None:
        if self.verdict == "record":
            raise MQClientError(
                f"transaction {self.id} is decided by its record in the business database: join(session) there, and"
                " commit() after its commit"
            )
        transactions = self._broker.outbox.transactions
        connection = self._outermost(transactions, handle, "commit", flush=True)
        if self._decides(transactions, connection):
            # This is a second call in the same transaction; or `join` was called in it, and the messages are appended
            # right before its commit.
            return
        with or_doomed(transactions, self._broker.ops, connection):
            decision = run(executor(connection), self._broker.ops.commit(self.id, by=self._by, group=self._half.group))
            if decision.op is None:
                self._require_all(frozenset())
            self._require_first(connection, decision)
            self._require_all(decision.restored)
        transactions.wrote(connection)
        if not decision.outermost:
            before_commit(transactions, connection, lambda: self._require_still_there(connection))
        self._decided = _Decided(transactions, connection, restored=True)

    def _decides(self, transactions: Transactions, connection: DriverConnection) -> bool:
        """Return whether the transaction that runs on this connection decides already."""
        running = transactions.running(connection)
        return running is not None and self._decided is not None and running is self._decided.transaction

    def _outermost(
        self, transactions: Transactions, handle: Handle, verb: str, *, flush: bool = False
    ) -> DriverConnection:
        if is_async(handle):
            fix = f"; with this one: await handle.run_sync(transaction.{verb})" if hasattr(handle, "run_sync") else ""
            raise TypeError(f"{verb} takes a Session or a Connection that blocks, not {type(handle).__name__}{fix}")
        connection = transactions.connection_of(handle, verb, flush=flush)
        if isinstance(connection, Connection):
            if connection.in_nested_transaction():
                raise NoTransactionError(
                    f"{verb} in a savepoint would be undone with it, while the business may be committed; call it"
                    " outside of every savepoint"
                )
        elif verb == "join":
            raise TypeError(
                "join takes a Session or a Connection of SQLAlchemy, because nobody is told of the commit of psycopg's"
                ' own; begin with verdict="commit", and call commit(connection) last in the transaction'
            )
        return connection

    def _require_first(self, connection: DriverConnection, decision: Decision) -> None:
        """Raise unless the verdict is that of this business transaction."""
        if not decision.first:
            require(decision, self.id, "commit", self._half.group)
            raise VerdictStandsError(self.id, "commit", "business transaction")
        # A savepoint is no error on SQLAlchemy's connections, because a check before the commit finds whether the
        # verdict is still there. A savepoint that was rolled back stays open on PostgreSQL, and most are never rolled
        # back to again.
        if not decision.outermost and not isinstance(connection, Connection):
            raise NoTransactionError("a savepoint is open on this connection; decide outside of every savepoint")

    def _restore_on(self, connection: DriverConnection) -> None:
        restored = run(executor(connection), self._broker.ops.restore(self.id))
        if restored is None and run(executor(connection), self._broker.ops.standing(self.id)).op == "commit":
            # It was committed before and nobody was told of that; since then its messages were restored elsewhere.
            return
        self._require_all(restored or frozenset())
        if self._decided is not None:
            self._decided.restored = True

    def _require_all(self, restored: frozenset[UUID]) -> None:
        """Raise unless the business transaction has restored all messages, whose ids are given."""
        self._restored = restored
        sent = frozenset(self._sent)
        if not sent <= restored:
            raise MQClientError(
                f"of the {len(sent)} half messages of transaction {self.id} the business transaction sees"
                f" {len(sent & restored)}: it decided inside a savepoint that was rolled back, or began before they"
                " were sent and is isolated from them; send before it begins"
            )

    def _require_still_there(self, connection: DriverConnection) -> None:
        if run(executor(connection), self._broker.ops.standing(self.id)).op != "commit":
            self._require_all(frozenset())


class _Decided:
    """The business transaction that decides; `restored`: it has appended the messages that were sent before."""

    def __init__(self, transactions: Transactions, connection: DriverConnection, *, restored: bool = False) -> None:
        self._transactions = transactions
        self._connection = connection
        self.restored = restored
        #: The object that stands for it; None on a driver's own connection.
        self.transaction = transactions.running(connection)

    def was_seen_to_commit(self) -> bool:
        """Return whether it has committed, with all that it did right before its commit."""
        return self.transaction is not None and self.transaction.committed

    def leaves_behind(self) -> bool:
        """Return whether it would not deliver a message that is sent now."""
        return self.restored and self.is_running()

    def is_running(self) -> bool:
        """Return whether it still runs; on a driver's own connection whether any transaction runs, perhaps the next."""
        if isinstance(self._connection, psycopg.Connection):
            return self._connection.info.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)
        return self._transactions.running(self._connection) is self.transaction


def end_by_word(
    broker: Broker,
    business: Business | None,
    transaction: str,
    op: Op,
    *,
    group: str,
    way: Way | None,
    recorded_in: str | None = None,
) -> None:
    """End a transaction from outside of its business transaction, if it has one.

    `recorded_in`: the business database that its half messages name, if another process has begun it.

    Raises:
        VerdictStandsError: the opposite stands, perhaps in the business database only.
        MQClientError: its business transaction has not been committed; or it is unknown, or of another group.
        DatabaseError: a database did not answer, so that it is not sure that the verdict was written.
    """
    databases = [broker.database] if business is None else [broker.database, business.database]
    with in_plain_words(f"the {op} of transaction {transaction} was perhaps not written", *databases):
        _end_by_word(broker, business, transaction, op, group=group, way=way, recorded_in=recorded_in)


def _end_by_word(
    broker: Broker,
    business: Business | None,
    transaction: str,
    op: Op,
    *,
    group: str,
    way: Way | None,
    recorded_in: str | None,
) -> None:
    if way == "record":
        if business is None:
            raise MQClientError(
                f"transaction {transaction} is decided by its record in the business database, whose engine this"
                " producer does not have: business=…"
            )
        business.require(transaction, op, recorded_in)
    elif way in ("join", "commit") and op == "commit" and broker.standing(transaction).op is None:
        verb = "join(session) first" if way == "join" else "commit(session) last"
        raise MQClientError(
            f"transaction {transaction} is decided by its business transaction, which has not been committed: call"
            f" {verb} in it"
        )
    broker.end(transaction, op, by=_by(group), group=group)


def _by(group: str) -> str:
    return f"producer {group}"
