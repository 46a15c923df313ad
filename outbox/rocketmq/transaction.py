"""Transactions with half messages, which a verdict delivers or drops."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outbox.errors import DatabaseError, MQClientError, NoTransactionError, OutboxError, VerdictStandsError
from outbox.model.limits import checked_headers, stored_headers
from outbox.model.message import TRANSACTION_ID, Message, MessageFields, traced
from outbox.model.slots import slot_of
from outbox.model.trace_context import trace_headers
from outbox.model.verdict import describe
from outbox.rocketmq.broker import CHECKER, Broker, in_plain_words, require, why
from outbox.rocketmq.business import or_doomed
from outbox.rocketmq.limits import checked_immunity
from outbox.rocketmq.states import (
    LocalTransactionState,
    MessageQueue,
    SendStatus,
    TransactionResolution,
    TransactionSendResult,
)
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

    As a context manager the transaction is committed when its block ends normally, unless a business transaction
    decides (see `verdict`). A block that raises writes no verdict, because its error may come from a commit whose
    answer was lost: check-back decides then.

    After a `join`, the end of the block also restores the messages of a business transaction whose commit SQLAlchemy
    does not see: the driver's own `commit()`, or a COMMIT as text.
    """

    def __init__(self, broker: Broker, half: Half, *, immunity: timedelta, business: Business | None = None) -> None:
        """`half`: the facts that each half message carries. `immunity`: the age below which no checker asks."""
        self._broker = broker
        self._half = half
        self._immunity = immunity
        self._business = business
        self._sent: set[UUID] = set()
        #: The messages that a business transaction has restored; None: no business transaction has done so yet.
        self._restored: frozenset[UUID] | None = None
        self._ended = False
        #: The business transaction that decides, after a `join`.
        self._decided: _Decided | None = None

    @property
    def id(self) -> str:
        """The id by which another process may end the transaction: `producer.end_transaction(id, …)`."""
        return self._half.transaction

    @property
    def verdict(self) -> Way:
        """The way to the verdict; see `begin_transaction`."""
        return self._half.way

    # Messages

    def send(self, topic: str, body: object, **fields: Unpack[MessageFields]) -> UUID:
        """Store one more half message; see `Message` for `fields`. Its message is not delivered before the commit.

        A delay counts from the commit. A header `CHECK_IMMUNITY_TIME_IN_SECONDS` says for how long no checker asks
        about the transaction.

        Raises:
            MQClientError: RocketMQ would refuse the message, or the transaction is over. "send message Exception": the
                database did not answer, so the half message may be stored or not.
            VerdictStandsError: a checker or another process has ended the transaction; nothing was stored.
            InvalidMessageError: the message is against a limit of the log.
        """
        message = Message(topic, body, **fields)
        self.store(message)
        return message.message_id

    def store(self, message: Message) -> TransactionSendResult:
        """Store a half message for a message that was made before; raises as `send`."""
        immunity = checked_immunity(message)
        if self._ended:
            raise MQClientError(f"transaction {self.id} is over; begin another one")
        if self._decided is not None and self._decided.restored and self._decided.is_running():
            raise self._left_behind()
        own = {**message.headers, TRANSACTION_ID: self.id}
        checked_headers(own)
        headers = stored_headers(traced(own, trace_headers(message.topic)))
        slot = slot_of(message.key, self._broker.database.slots)
        restored = self._restored
        try:
            recorded_in = self._business.identity if self.verdict == "record" and self._business is not None else None
            half = replace(self._half, immunity=immunity, recorded_in=recorded_in)
            self._broker.declare(half.group, self._immunity)
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
        return TransactionSendResult(
            send_status=SendStatus.SEND_OK,
            message_queue=MessageQueue(message.topic, slot),
            msg_id=str(message.message_id),
            queue_offset=place,
            transaction_id=self.id,
            local_transaction_state=LocalTransactionState.UNKNOW,
        )

    # Verdicts

    def join(self, handle: Handle) -> None:
        """Let a business transaction decide. Call it in the business transaction before everything else.

        When the business transaction commits, the messages are delivered; when it rolls back, they are dropped. With
        verdict="record" the business transaction is in the business database, and a `commit()` after it makes the
        delivery quicker.

        Args:
            handle: a `Session`, a `scoped_session` or a `Connection`, in no savepoint; with verdict="join" also a
                psycopg connection, which calls `commit(connection)` before its commit.

        Raises:
            VerdictStandsError: a checker has decided for a rollback, because no verdict came for too long; or another
                business transaction has committed. This business transaction cannot be committed any more.
        """
        self._require_sent()
        if self.verdict == "listener":
            with_business = ' (or "record", for one of the business database)' if self._business is not None else ""
            raise MQClientError(
                'this transaction was begun with verdict="listener", so no business transaction joins it; begin with'
                f' verdict="join"{with_business}'
            )
        business = self._business if self.verdict == "record" else None
        transactions = self._broker.outbox.transactions if business is None else business.transactions
        connection = self._outermost(transactions, handle)
        running = transactions.running(connection)
        if self._decided is not None and running is not None and running is self._decided.transaction:
            return  # a second call in the same business transaction
        if business is not None:
            assert isinstance(connection, Connection), "a driver's own connection was refused"
            business.join(connection, self.id)
        else:
            with or_doomed(transactions, connection):
                decision = self._broker.database.execute(
                    connection, self._broker.ops.join(self.id, by=_by(self._half.group))
                )
                self._require_first(connection, decision)
            transactions.wrote(connection)
            if isinstance(connection, Connection):
                transactions.before_commit(connection, lambda: self._restore_on(connection))
        self._decided = _Decided(transactions, connection)

    def commit(self, connection: psycopg.Connection[Any] | None = None) -> None:
        """Commit the transaction synchronously, so that its messages are delivered.

        If the outcome of a call is not clear, call again. After a `join` the call restores the messages of a business
        transaction whose commit SQLAlchemy did not see.

        Args:
            connection: psycopg's own connection whose business transaction has joined. The call appends the messages in
                that business transaction; make it the last call before the commit.

        Raises:
            VerdictStandsError: the transaction was rolled back before, perhaps by a checker.
            MQClientError: nothing was sent; or RocketMQ would refuse the call.
        """
        self._require_sent()
        if connection is None:
            end_by_word(self._broker, self._business, self._half, "commit")
            self._ended = True
            return
        if not isinstance(connection, psycopg.Connection):
            raise TypeError(
                f"commit takes a psycopg connection, not {type(connection).__name__}: a Session or a Connection of"
                " SQLAlchemy appends the messages by itself after join(session)"
            )
        decided = self._decided
        if (
            self.verdict != "join"
            or decided is None
            or decided.connection is not connection
            or not decided.is_running()
        ):
            raise MQClientError(
                f'transaction {self.id} was not joined by this connection: begin with verdict="join", and call'
                " join(connection) first in the business transaction"
            )
        # Outside of a transaction the mark of the join would be taken away without the messages.
        self._broker.outbox.transactions.require_driver(connection)
        with or_doomed(self._broker.outbox.transactions, connection):
            self._restore_on(connection)

    def rollback(self) -> None:
        """Roll back: the messages are never delivered. Do not call this if the business may still be committed.

        Raises:
            VerdictStandsError: the transaction was committed before.
            MQClientError: nothing was sent; or RocketMQ would refuse the call.
        """
        self._require_sent()
        if self._decided is not None and self._decided.is_running():
            raise MQClientError(f"transaction {self.id} is decided by its business transaction: roll that one back")
        end_by_word(self._broker, self._business, self._half, "rollback")
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
        if self._decided is not None:
            if self.verdict == "record":
                self._commit_recorded()
            self._restore_unseen()
        elif self.verdict == "listener":
            self.commit()
        else:
            raise MQClientError(
                f"transaction {self.id} was left without a verdict, and will be rolled back: call join(session) in the"
                " business transaction, or rollback()"
            )

    def _was_ended_by_hand(self) -> bool:
        """Return whether a program or a person has ended the transaction by its id; check-back does not count."""
        stands = self._broker.standing(self.id)
        return stands.op is not None and stands.by is not None and not stands.by.startswith(CHECKER)

    # How it is done

    def _commit_recorded(self) -> None:
        """Commit after the commit of the business; if a database is away now, check-back finds the record."""
        try:
            self.commit()
        except DatabaseError as error:
            logger.warning("%s; check-back finds the record", error)

    def _restore_unseen(self) -> None:
        """Restore the messages of a joined business transaction whose commit SQLAlchemy did not see."""
        if self.verdict != "join" or self._decided is None:
            return
        if self._decided.transaction is not None and self._decided.transaction.committed:
            return  # SQLAlchemy has seen the commit, with all hooks right before it
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
            " send before the business transaction begins"
        )

    def _require_sent(self) -> None:
        if not self._sent:
            raise MQClientError("Transactional message has not been sent yet")

    def _outermost(self, transactions: Transactions, handle: Handle) -> DriverConnection:
        """Return the connection of a handle that is in no savepoint, as far as SQLAlchemy knows."""
        if is_async(handle):
            fix = "; for this handle: await handle.run_sync(transaction.join)" if hasattr(handle, "run_sync") else ""
            raise TypeError(f"join takes a Session or a Connection that blocks, not {type(handle).__name__}{fix}")
        if isinstance(handle, psycopg.Connection) and self.verdict == "record":
            raise TypeError(
                'with verdict="record" join takes a Session or a Connection of SQLAlchemy, because the record is looked'
                " for right before the commit, of which psycopg's own connection tells nobody"
            )
        connection = transactions.connection_of(handle, "join", flush=False)
        if isinstance(connection, Connection) and connection.in_nested_transaction():
            raise NoTransactionError(
                "join in a savepoint would be undone with it, while the business may be committed; call join outside of"
                " every savepoint"
            )
        return connection

    def _require_first(self, connection: DriverConnection, decision: Decision) -> None:
        if not decision.first:
            require(decision, self.id, "commit", self._half.group)
            raise VerdictStandsError(self.id, "commit", "business transaction")
        # A savepoint is no error on SQLAlchemy's connections, because a check before the commit finds whether the
        # verdict is still there. A savepoint that was rolled back stays open on PostgreSQL, and most are never rolled
        # back to again.
        if not decision.outermost and not isinstance(connection, Connection):
            raise NoTransactionError("a savepoint is open on this connection; join outside of every savepoint")

    def _restore_on(self, connection: DriverConnection) -> None:
        """Append the messages in the business transaction that has joined."""
        execute, ops = self._broker.database.execute, self._broker.ops
        restored = execute(connection, ops.restore(self.id))
        if restored is None and execute(connection, ops.standing(self.id)).op == "commit":
            # The business was committed before and nobody was told; since then the messages were restored elsewhere.
            return
        self._restored = restored or frozenset()
        sent = frozenset(self._sent)
        if not sent <= self._restored:
            raise MQClientError(
                f"of the {len(sent)} half messages of transaction {self.id} the business transaction sees"
                f" {len(sent & self._restored)}: join was undone with a savepoint, or the business transaction is"
                " isolated and began before a message was sent; send first, then begin"
            )
        if self._decided is not None:
            self._decided.restored = True


class _Decided:
    """The business transaction that decides; `restored`: the messages sent before are appended."""

    def __init__(self, transactions: Transactions, connection: DriverConnection) -> None:
        self._transactions = transactions
        self.connection = connection
        self.restored = False
        #: The object that stands for the business transaction; None on a driver's own connection.
        self.transaction = transactions.running(connection)

    def is_running(self) -> bool:
        """Return whether the transaction runs; on a driver's own connection the next transaction counts, too."""
        if isinstance(self.connection, psycopg.Connection):
            return self.connection.info.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)
        return self._transactions.running(self.connection) is self.transaction


def end_by_word(broker: Broker, business: Business | None, half: Half, op: Op) -> None:
    """End a transaction from outside of its business transaction, if it has one.

    `half`: of its facts the group, the way and the business database count.
    """
    transaction = half.transaction
    databases = [broker.database] if business is None else [broker.database, business.database]
    with in_plain_words(f"the {op} of transaction {transaction} was perhaps not written", *databases):
        if half.way == "record":
            if business is None:
                raise MQClientError(
                    f"transaction {transaction} is decided by its record in the business database, whose engine this"
                    " producer does not have: business=…"
                )
            business.require(transaction, op, half.recorded_in)
        elif half.way == "join" and op == "commit" and broker.standing(transaction).op is None:
            raise MQClientError(
                f"transaction {transaction} is decided by its business transaction, which has not been committed: call"
                " join(session) first in it"
            )
        broker.end(transaction, op, by=_by(half.group), group=half.group)


def _by(group: str) -> str:
    return f"producer {group}"
