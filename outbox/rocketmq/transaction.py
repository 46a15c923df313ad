"""A transaction with half messages: what its messages are, and how its business says what became of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack
from uuid import UUID

from sqlalchemy import Connection

from outbox.checks import checked_headers, stored_headers
from outbox.errors import MQClientError, NoTransactionError, VerdictStandsError
from outbox.message import TRANSACTION_ID, Message, MessageFields, traced, uuid7
from outbox.rocketmq.broker import Broker, require
from outbox.rocketmq.business import before_commit, doom
from outbox.rocketmq.limits import check_message, immunity_of
from outbox.rocketmq.states import TransactionResolution
from outbox.store.half import Half, Way
from outbox.store.idempotency.op import Decision
from outbox.store.steps import on, run
from outbox.tracing import trace_headers
from outbox.transactions import Transactions

if TYPE_CHECKING:
    from outbox.handles import Handle, Link
    from outbox.rocketmq.business import Business


class Transaction:
    """Any number of messages that one verdict delivers or drops; made by `TransactionMQProducer.begin_transaction`.

    As a context manager: left normally it is committed, where nothing else decides (see `verdict`); left by an
    exception nothing is said, because that may come from a commit whose answer was lost. Then check-back decides.
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
        self._half = Half(transaction=str(uuid7()) if id is None else id, group=group, way=way, fence_after=fence_after)
        #: `_ended`: by a verdict of its own; `_joined`: a business transaction was told to decide, perhaps on this one.
        self._ended = self._joined = False
        self._decided_on: Link | None = None

    @property
    def id(self) -> str:
        """By which another process may end it: `producer.end_transaction(id, …)`."""
        return self._half.transaction

    @property
    def verdict(self) -> Way:
        """The way to its verdict."""
        return self._half.way

    # Messages

    def send(self, topic: str, body: object, **fields: Unpack[MessageFields]) -> UUID:
        """Store one more half message; see `Message` for `fields`. Nobody gets it before the commit.

        A delay counts from the commit. `CHECK_IMMUNITY_TIME_IN_SECONDS` among the headers: for so long the transaction
        is not asked about.

        Raises:
            MQClientError: RocketMQ would refuse the message, or the transaction is over.
            InvalidMessageError: a limit of the log.
        """
        message = Message(topic, body, **fields)
        self.send_message(message)
        return message.message_id

    def send_message(self, message: Message) -> int:
        """Store a half message for a message that was made before; return its place in the log."""
        check_message(message)
        if self._ended:
            raise MQClientError(f"transaction {self.id} is over; begin another one")
        immunity = immunity_of(message)
        half = Half(
            transaction=self.id,
            group=self._half.group,
            way=self._half.way,
            immunity=None if immunity is None else timedelta(seconds=immunity),
            fence_after=self._half.fence_after,
        )
        own = {**message.headers, TRANSACTION_ID: self.id}
        checked_headers(own)
        headers = stored_headers(traced(own, trace_headers()))
        self._declare()
        place = self._broker.prepare(half, message, headers)
        self._sent.add(message.message_id)
        return place

    # Verdicts

    def join(self, handle: Handle) -> None:
        """Make the end of a business transaction the verdict: call it first of all in that transaction.

        When it commits, the messages go with it; when it rolls back, they are dropped. With verdict="record" it is a
        transaction of the business database; `commit()` after it only makes the delivery quicker.

        Args:
            handle: a `Session`, a `scoped_session` or a `Connection`, in no savepoint.

        Raises:
            VerdictStandsError: a checker has decided for a rollback, because nothing was heard for too long. The
                business transaction cannot be committed any more.
        """
        self._require_sent()
        if self.verdict == "record":
            assert self._business is not None
            link = self._outermost(self._business.transactions, handle, "join")
            self._business.join(link, self.id)
        elif self.verdict == "join":
            link = self._outermost(self._broker.outbox.transactions, handle, "join")
            self._decide_in(link, run(on(link), self._broker.ops.join(self.id, by=self._by)))
            self._decided_on = link
            self._broker.outbox.transactions.sent(link)
            before_commit(self._broker.outbox.transactions, link, lambda: self._restore_on(link))
        else:
            raise MQClientError(f'this transaction was begun with verdict="{self.verdict}"; begin it with "join"')
        self._joined = True

    def commit(self, handle: Handle | None = None) -> None:
        """Commit: deliver the messages, synchronously; whoever is not sure whether it worked asks again.

        Args:
            handle: the business transaction that the verdict is to be part of, if any: call it last of all in it.

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
            self._require_business_committed()
            self._broker.end(self.id, "commit", by=self._by, group=self._half.group)
            self._ended = True

    def rollback(self) -> None:
        """Roll back: nobody ever gets the messages. Not for a transaction whose business may be committed yet.

        Raises:
            VerdictStandsError: it was committed before.
            MQClientError: nothing was sent; or RocketMQ would refuse it.
        """
        self._require_sent()
        if self._decided_on is not None and self._broker.outbox.transactions.has_sent(self._decided_on):
            raise MQClientError(f"transaction {self.id} is decided by its business transaction: roll that one back")
        if self._business is not None and self.verdict == "record":
            # First there, where the business might commit after all.
            stands = self._business.fence(self.id)
            if stands != "rollback":
                raise VerdictStandsError(self.id, stands or "commit", "rollback")
        self._broker.end(self.id, "rollback", by=self._by, group=self._half.group)
        self._ended = True

    @property
    def resolution(self) -> TransactionResolution:
        """The verdict that stands, asked of the database; UNKNOWN: there is none."""
        op = self._broker.standing(self.id).op
        return TransactionResolution.UNKNOWN if op is None else TransactionResolution(op)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or self._ended or not self._sent:
            return
        if self._joined:
            if self.verdict == "record":
                self.commit()
        elif self.verdict == "listener":
            self.commit()
        else:
            verb = "commit(session)" if self.verdict == "commit" else "join(session)"
            raise MQClientError(
                f"transaction {self.id} was left without a verdict, and will be rolled back: call {verb} in the"
                " business transaction, or rollback()"
            )

    # How it is done

    @property
    def _by(self) -> str:
        return f"producer {self._half.group}"

    def _require_sent(self) -> None:
        if not self._sent:
            raise MQClientError("Transactional message has not been sent yet")

    def _require_business_committed(self) -> None:
        """Without a handle only a listener's transaction is committed by word alone."""
        if self.verdict == "record":
            assert self._business is not None
            if self._business.standing(self.id) != "commit":
                raise MQClientError(
                    f"transaction {self.id} has no record of a commit in the business database; join(session) in the"
                    " business transaction, and commit() after its commit"
                )
        elif self.verdict != "listener" and self._broker.standing(self.id).op is None:
            verb = "join(session) first" if self.verdict == "join" else "commit(session) last"
            raise MQClientError(
                f"transaction {self.id} is decided by its business transaction, which has not been committed: call"
                f" {verb} in it"
            )

    def _commit_in(self, handle: Handle) -> None:
        transactions = self._broker.outbox.transactions
        link = self._outermost(transactions, handle, "commit", flush=True)
        if self._decided_on is link and self._broker.outbox.transactions.has_sent(link):
            # Once more in the same transaction; or by its first statement, and the messages follow before its end.
            return
        decision = run(on(link), self._broker.ops.commit(self.id, by=self._by, group=self._half.group))
        self._decide_in(link, decision)
        self._require_all(decision.restored)
        self._decided_on = link
        transactions.sent(link)
        if not self._broker.database.dialect.chains_writes:
            before_commit(transactions, link, lambda: self._require_still_there(link))

    def _outermost(self, transactions: Transactions, handle: Handle, verb: str, *, flush: bool = False) -> Link:
        link = transactions.link_of(handle, verb, flush=flush)
        if isinstance(link, Connection):
            if link.in_nested_transaction():
                raise NoTransactionError(
                    f"{verb} in a savepoint would be undone with it, while the business may be committed; call it"
                    " outside of every savepoint"
                )
        elif verb == "join":
            raise TypeError(
                "join takes a Session or a Connection of SQLAlchemy, because nobody is told of the commit of psycopg's"
                ' own; begin with verdict="commit", and call commit(connection) last in the transaction'
            )
        return link

    def _decide_in(self, link: Link, decision: Decision) -> None:
        """Make sure that the verdict is that of this business transaction, which cannot be committed otherwise."""
        try:
            if not decision.first:
                require(decision, self.id, "commit", self._half.group)
                raise VerdictStandsError(self.id, "commit", "business transaction")
            if not decision.outermost:
                raise NoTransactionError("a savepoint is open on this connection; decide outside of every savepoint")
        except Exception as error:
            doom(self._broker.outbox.transactions, self._broker.ops, link, error)
            raise

    def _restore_on(self, link: Link) -> None:
        self._require_all(run(on(link), self._broker.ops.restore(self.id)))

    def _require_all(self, restored: int) -> None:
        if restored < len(self._sent):
            raise MQClientError(
                f"of the {len(self._sent)} half messages of transaction {self.id} the business transaction sees"
                f" {restored}: it decided inside a savepoint that was rolled back, or began before they were sent and"
                " is isolated from them; send before it begins"
            )

    def _require_still_there(self, link: Link) -> None:
        if run(on(link), self._broker.ops.standing(self.id)).op != "commit":
            self._require_all(0)
