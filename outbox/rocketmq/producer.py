"""The producer of transactional messages, in both shapes that RocketMQ's clients have."""

from __future__ import annotations

import logging
import os
import weakref
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, get_args

from sqlalchemy import Engine

from outbox.errors import MQClientError, VerdictStandsError
from outbox.model.message import TRANSACTION_ID, Message, uuid7
from outbox.relay.supervisor import Supervisor
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.business import Business
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.limits import checked_group, checked_transaction_id, require_message
from outbox.rocketmq.listener import Question, TransactionChecker, TransactionListener, execution_of, question_of
from outbox.rocketmq.service import CheckService
from outbox.rocketmq.states import LocalTransactionState, TransactionResolution, TransactionSendResult, op_of
from outbox.rocketmq.transaction import Transaction, end_by_word
from outbox.store.half_messages.half import Half, Way
from outbox.writing.bare import BareOutbox

logger = logging.getLogger("outbox")

#: Groups that check back in this process: two producers of one group would take the lease away from each other.
_started: weakref.WeakKeyDictionary[BareOutbox, set[tuple[int, str]]] = weakref.WeakKeyDictionary()


class TransactionMQProducer:
    """Sends messages that are delivered after their transaction is committed, and never if it is rolled back.

    Args:
        group: the producer group; any live producer of a group may be asked about its transactions.
        outbox: the outbox that stores messages, half messages and verdicts.
        listener: a `TransactionListener` executes local transactions and is asked about them. A `TransactionChecker`,
            or a function of one message, is only asked. None: only business transactions in a database decide.
        business: the engine of the business database, for verdict="record".
        policy: when check-back asks, and how often.
        half_pool: the most connections that the producer opens for half messages and verdicts.

    Raises:
        TypeError: the listener is none, or a method is misspelt or written with async.
        MQClientError: RocketMQ would refuse the name of the group.
    """

    def __init__(
        self,
        group: str,
        outbox: BareOutbox,
        listener: TransactionListener | TransactionChecker | Question | None = None,
        *,
        business: Engine | None = None,
        policy: CheckPolicy | None = None,
        half_pool: int = 5,
    ) -> None:
        self.group = checked_group(group)
        if not isinstance(outbox, BareOutbox):
            raise TypeError(f"outbox is an Outbox, not {type(outbox).__name__}: pass Outbox(engine)")
        if business is not None and not isinstance(business, Engine):
            raise TypeError(f"business is the engine of the business database, not {type(business).__name__}")
        self._outbox = outbox
        self._policy = policy or CheckPolicy()
        self._broker = Broker(outbox, connections=half_pool)
        self._business = None if business is None else Business(business, connections=half_pool)
        self._checks_back = False
        self._supervisor: Supervisor | None = None
        self.set_transaction_listener(listener)

    def set_transaction_listener(self, listener: TransactionListener | TransactionChecker | Question | None) -> None:
        """Set the listener, before `start` or after `shutdown`.

        Raises:
            TypeError: the listener is none, or a method is misspelt or written with async.
            MQClientError: the producer was started.
        """
        if self._checks_back:
            raise MQClientError("the producer was started: call set_transaction_listener before start()")
        self._question = question_of(listener)
        self._execute = execution_of(listener)
        self._listener = listener
        self._service = CheckService.of(self._broker, self.group, self._policy, self._question, self._business)

    # The 4.x shape

    def send_message_in_transaction(
        self, message: Message, arg: Any = None, *, swallow: bool = False
    ) -> TransactionSendResult:
        """Store a half message, execute the local transaction, and write its verdict; all before this returns.

        If the local transaction raises, its state is UNKNOW, so that check-back decides, and the error is raised again.
        With `swallow` the error is not raised, as in RocketMQ.

        Raises:
            MQClientError: there is no listener, or the message is refused; then nothing was stored. Or "send message
                Exception": the half message may be stored or not, and the local transaction was not executed.
            InvalidMessageError: the message is against a limit of the log; nothing was stored.
            VerdictStandsError: check-back decided otherwise meanwhile.
        """
        if self._execute is None:
            raise MQClientError(
                "TransactionListener is null"
                if self._listener is None
                else f"the listener ({type(self._listener).__name__}) has no execute_local_transaction(message, arg),"
                " and is only asked: give the producer a listener that has it, or use begin_transaction"
            )
        transaction = self._begin("listener", id=str(require_message(message).message_id))
        stored = transaction.store(message)
        state, raised, odd = LocalTransactionState.UNKNOW, None, None
        try:
            answer = self._execute(_in_transaction(message, transaction.id), arg)
            op = op_of(answer)
            state = LocalTransactionState.UNKNOW if op is None else LocalTransactionState(op)
            odd = _why_no_state(answer)
            if odd is not None:
                logger.warning("the local transaction of %s: %s", transaction.id, odd)
        except Exception as error:
            raised = error
            logger.warning("the local transaction of %s raised %s", transaction.id, type(error).__name__)
        state, unrecorded = _recorded(transaction, state)
        if raised is not None and not swallow:
            raise raised
        return replace(stored, local_transaction_state=state, error=raised or unrecorded or odd)

    # The 5.x shape

    def begin_transaction(self, *, verdict: Way | None = None, id: str | None = None) -> Transaction:
        """Begin a transaction of any number of messages.

        Args:
            verdict: who decides if nobody has ended the transaction. "listener": the listener or checker is asked.
                "join": a business transaction in the outbox's own database, which joins at its beginning. "record": a
                business transaction in the `business` database. None: "listener" if the producer has a listener, else
                "record" if it has a `business`.
            id: of the transaction; None: a new one. After a second beginning with the same id, a message that is sent
                again with its own id is delivered once.

        Raises:
            MQClientError: the producer lacks the listener or the `business` for this verdict; or RocketMQ would refuse
                the id.
        """
        if verdict is None and self._question is None and self._business is None:
            raise MQClientError(
                "Transaction checker should not be null: give the producer a listener or a checker; or, if a business"
                ' transaction in the outbox\'s own database decides, say so by verdict="join"'
            )
        way = verdict or ("record" if self._question is None else "listener")
        if way not in get_args(Way):
            raise ValueError(f"verdict is one of {', '.join(get_args(Way))}, not {verdict!r}")
        if way == "listener" and self._question is None:
            raise MQClientError("Transaction checker should not be null")
        if way == "record" and self._business is None:
            raise MQClientError('verdict="record" needs the engine of the business database: business=…')
        return self._begin(way, id=str(uuid7()) if id is None else checked_transaction_id(id))

    def send(self, message: Message, transaction: Transaction) -> TransactionSendResult:
        """Store a half message in a transaction, as RocketMQ's 5.x clients write it.

        Raises:
            TypeError: the transaction is none, or the arguments are in the other order.
        """
        given: tuple[object, object] = (message, transaction)  # for those who do not check types
        if not isinstance(given[1], Transaction):
            found = "the other way round" if isinstance(given[0], Transaction) else f"not {type(given[1]).__name__}"
            raise TypeError(
                f"send takes a message and its transaction, {found}: send(message, transaction), with the transaction"
                " of begin_transaction(); outbox.send(session, topic, body) sends a message without one"
            )
        return transaction.store(message)

    def end_transaction(
        self, transaction_id: str, state: LocalTransactionState | TransactionResolution
    ) -> TransactionResolution:
        """End a transaction that perhaps another process has begun; return the verdict that stands.

        UNKNOWN changes nothing. If the outcome of a call is not clear, call again.

        Raises:
            VerdictStandsError: the opposite stands.
            MQClientError: the transaction is unknown, or of another group; or it is to be committed, and the business
                transaction that decides has not been committed.
            DatabaseError: a database did not answer, or a business transaction is deciding and does not end.
        """
        if not transaction_id:
            raise MQClientError("transaction id cannot be empty")
        if not isinstance(transaction_id, str):
            raise TypeError(f"a transaction id is a str, not {type(transaction_id).__name__}")
        if not isinstance(state, LocalTransactionState | TransactionResolution):
            raise TypeError(f"a transaction ends with a state or a resolution, not with {type(state).__name__}")
        op = op_of(state)
        stands = self._broker.standing(transaction_id)
        if op is None:
            return TransactionResolution.UNKNOWN if stands.op is None else TransactionResolution(stands.op)
        # A transaction of another group, or one that has its verdict, is the broker's to refuse or to confirm.
        is_open = stands.op is None and stands.group == self.group
        way: Way = stands.way if is_open and stands.way is not None else "listener"
        half = Half(transaction=transaction_id, group=self.group, way=way, recorded_in=stands.recorded_in)
        end_by_word(self._broker, self._business, half, op)
        return TransactionResolution(op)

    # Checking back

    def start(self) -> None:
        """Check back in a thread of this process until `shutdown`, while no other process of the group does.

        Raises:
            MQClientError: another producer of this group does so in this process.
        """
        groups = _started.setdefault(self._outbox, set())
        here = (os.getpid(), self.group)
        if here in groups:
            raise MQClientError(
                f"The producer group[{self.group}] has been created before, specify another name please."
            )
        groups.add(here)
        self._checks_back = True
        if self._supervisor is None or not self._supervisor.alive:
            self._supervisor = Supervisor([self._service])
            self._supervisor.start()

    def shutdown(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """Finish the question under way, and close the connections."""
        if self._supervisor is not None:
            self._supervisor.stop()
            self._supervisor.join(timeout.total_seconds())
        self._checks_back = False
        _started.get(self._outbox, set()).discard((os.getpid(), self.group))
        self._broker.close()
        if self._business is not None:
            self._business.close()

    def close(self) -> None:
        """Shut down, by the name of RocketMQ's 5.x clients."""
        self.shutdown()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _begin(self, way: Way, *, id: str) -> Transaction:
        half = Half(transaction=id, group=self.group, way=way)
        return Transaction(self._broker, half, immunity=self._policy.transaction_timeout, business=self._business)


def _recorded(transaction: Transaction, state: LocalTransactionState) -> tuple[LocalTransactionState, Exception | None]:
    """Write the verdict; return the recorded state, and the error if another state was given."""
    try:
        if state is LocalTransactionState.COMMIT_MESSAGE:
            transaction.commit()
        elif state is LocalTransactionState.ROLLBACK_MESSAGE:
            transaction.rollback()
    except (VerdictStandsError, MQClientError):
        raise
    except Exception as error:
        logger.warning("check-back decides on transaction %s: %s", transaction.id, error)
        return LocalTransactionState.UNKNOW, error
    return state, None


def _why_no_state(answer: object) -> TypeError | None:
    """Return the error for a local transaction that returned no state, most often because it has no `return`."""
    if isinstance(answer, LocalTransactionState | TransactionResolution):
        return None
    return TypeError(
        f"it returned {type(answer).__name__} instead of a LocalTransactionState, which counts as UNKNOW: check-back"
        " will ask"
    )


def _in_transaction(message: Message, transaction: str) -> Message:
    """Return the message as a listener sees it: a copy, so that the caller's own stays as it is."""
    copy = message.replace(headers={**message.headers, TRANSACTION_ID: transaction})
    copy.message_id = message.message_id
    return copy
