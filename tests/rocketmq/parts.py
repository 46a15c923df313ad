"""What tests of RocketMQ's transactions share: listeners, a look of the check service, and what the tables say."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox
from outbox.model.verdict import Verdict
from outbox.relay.supervisor import Supervisor
from outbox.rocketmq import LocalTransactionState, TransactionMQProducer
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.business import Business
from outbox.rocketmq.checker import Checker, CheckPolicy
from outbox.rocketmq.service import CheckService
from outbox.worker.settings import Settings
from tests.support.readers import delivered
from tests.support.waiting import eventually

GROUP = "orders-group"
CHECK = f"check:{GROUP}"
COMMIT, ROLLBACK, UNKNOW = (
    LocalTransactionState.COMMIT_MESSAGE,
    LocalTransactionState.ROLLBACK_MESSAGE,
    LocalTransactionState.UNKNOW,
)
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
#: For what no database answers.
ONE_DATABASE = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
#: So young that it is over before anybody looks.
IMMUNITY = timedelta(milliseconds=1)
#: No pause at all would be refused.
AT_ONCE, HOUR = timedelta.resolution, timedelta(hours=1)


class Listener:
    """Answers what it was told to: a value; an exception, which it raises; or what a function says to the message."""

    def __init__(self, outcome: Any = COMMIT, answer: Any = UNKNOW) -> None:
        self.outcome, self.answer = outcome, answer
        self.executed: list[tuple[Message, Any]] = []
        self.asked: list[Message] = []

    def execute_local_transaction(self, message: Message, arg: Any) -> Any:
        """The business."""
        self.executed.append((message, arg))
        return given(self.outcome, message)

    def check_local_transaction(self, message: Message) -> Any:
        """The question."""
        self.asked.append(message)
        return given(self.answer, message)


def given(what: Any, message: Message) -> Any:
    """Raise an exception, call a function, return anything else."""
    if isinstance(what, BaseException):
        raise what
    return what(message) if callable(what) else what


def producer_of(outbox: Outbox, listener: Any = None, group: str = GROUP, **options: Any) -> TransactionMQProducer:
    """A producer whose transactions may be asked about at once."""
    names = {each.name for each in fields(CheckPolicy)} & options.keys()
    policy = CheckPolicy(**{"transaction_timeout": IMMUNITY, **{name: options.pop(name) for name in names}})
    return TransactionMQProducer(group, outbox, listener, policy=policy, **options)


def half_rows(outbox: Outbox) -> list[Message]:
    """The half messages of the group without a verdict, as the check service reads them."""
    return delivered(outbox.database, name="rows", kind="check", topics=(HALF_TOPIC,), tags=(GROUP,))


def wait_until_old_enough(outbox: Outbox) -> None:
    """Wait until all that is there is older than the immunity, by the clock of the database."""
    with closing(outbox.database.open()) as channel:
        begins = channel.now()
        assert eventually(lambda: channel.now() - begins > IMMUNITY)


def looked_at(
    outbox: Outbox, rows: list[Message], answer: Any = None, *, business: Engine | None = None
) -> list[Verdict]:
    """What a checker makes of half messages; only verdicts are written: others may be at work."""
    wait_until_old_enough(outbox)
    checker = Checker(
        Broker(outbox, connections=1),
        GROUP,
        CheckPolicy(transaction_timeout=IMMUNITY, check_interval=HOUR),
        None if answer is None else Listener(answer=answer).check_local_transaction,
        None if business is None else Business(business, connections=1),
    )
    try:
        return checker.check(rows)
    finally:
        checker.close()


def service_of(
    outbox: Outbox,
    question: Callable[[Message], object] | None,
    /,
    *,
    business: Engine | None = None,
    settings: Settings | None = None,
    **policy: Any,
) -> Supervisor:
    """Somebody of the group who checks back; in an hour again, unless told otherwise."""
    service = CheckService.of(
        Broker(outbox, connections=1),
        GROUP,
        CheckPolicy(**{"transaction_timeout": IMMUNITY, "check_interval": HOUR, **policy}),
        question,
        None if business is None else Business(business, connections=1),
        settings,
    )
    return Supervisor([service])


def end(service: Supervisor, seconds: float = 60) -> None:
    """Ask a check service to stop, and wait for its end."""
    service.stop()
    service.join(seconds)


def check_back(outbox: Outbox, answer: Any = None, **options: Any) -> list[Message]:
    """Ask about every transaction that is due, and return what was asked; without an answer there is no listener.

    A question may take a minute, unless told otherwise.
    """
    listener = Listener(answer=answer)
    wait_until_old_enough(outbox)
    options = {"check_timeout": timedelta(minutes=1), **options}
    service_of(outbox, None if answer is None else listener.check_local_transaction, **options).until_empty()
    return listener.asked


def arrived(outbox: Outbox) -> list[str]:
    """What a consumer gets now that it has not got before."""
    return [message.body.decode() for message in delivered(outbox.database)]


def verdicts(engine: Engine) -> dict[str, str]:
    """Which verdicts stand."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT transaction_id, op FROM outbox_op"))
        return {row[0]: row[1] for row in rows}


def parked(engine: Engine) -> list[tuple[str, int]]:
    """The transactions that the check service has parked: state, and how often they were asked about."""
    statement = text(
        "SELECT coalesce(state, 'behind'), attempts FROM outbox_parked WHERE subscription = :name ORDER BY id"
    )
    with engine.connect() as connection:
        return [(row[0], row[1]) for row in connection.execute(statement, {"name": CHECK})]


def halves(engine: Engine) -> int:
    """How many half messages there are."""
    with engine.connect() as connection:
        counted = connection.execute(text(f"SELECT count(*) FROM outbox_message WHERE topic = '{HALF_TOPIC}'"))
        return int(counted.scalar_one())


def one(producer: TransactionMQProducer, body: str = "1"):
    """A transaction with a message."""
    transaction = producer.begin_transaction()
    transaction.send("orders", body)
    return transaction
