"""Transactions for tests that look at them: begun by a producer, asked about when a test says so, and in bulk."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.model.message import Message
from outbox.relay.supervisor import Supervisor
from outbox.rocketmq import Transaction, TransactionMQProducer, TransactionResolution
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.service import CheckService
from outbox.store.half_messages.half import Way

AT_ANY_AGE = CheckPolicy(transaction_timeout=timedelta(0))


def unknown(_message: Message) -> TransactionResolution:
    """Nobody knows."""
    return TransactionResolution.UNKNOWN


def producer(engine: Engine, group: str = "shop", *, timeout: timedelta = timedelta(0)) -> TransactionMQProducer:
    """A producer whose listener never knows, and which checks back only when it is told to."""
    return TransactionMQProducer(group, Outbox(engine), unknown, policy=CheckPolicy(transaction_timeout=timeout))


def begun(
    engine: Engine, *topics: str, group: str = "shop", verdict: Way = "listener", timeout: timedelta = timedelta(0)
) -> Transaction:
    """A transaction with a message of each topic, which says so."""
    transaction = producer(engine, group, timeout=timeout).begin_transaction(verdict=verdict)
    for topic in topics or ("orders",):
        transaction.send(topic, f"of {topic}")
    return transaction


def ask(engine: Engine, *, group: str = "shop", answer: Callable[[Message], Any] = unknown, again: bool = True) -> None:
    """Ask about all that is pending, until it is given up after two questions; not `again`: once."""
    broker = Broker(Outbox(engine), connections=1)
    interval = timedelta.resolution if again else timedelta(hours=1)
    policy = CheckPolicy(transaction_timeout=timedelta(0), check_interval=interval, check_max=2)
    Supervisor([CheckService.of(broker, group, policy, answer)]).until_empty()
    broker.close()


BULK = {
    "postgresql": """
        INSERT INTO outbox_message (message_id, topic, key, slot, tags, headers, body, created_at)
        SELECT gen_random_uuid(), 'RMQ_SYS_TRANS_HALF_TOPIC', 'b' || lpad(n::text, 9, '0'), 0, 'shop', :headers, '',
               statement_timestamp() FROM generate_series(1, :rows) AS n""",
    "sqlite": """
        WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :rows)
        INSERT INTO outbox_message (message_id, topic, key, slot, tags, headers, body, created_at)
        SELECT lower(hex(randomblob(16))), 'RMQ_SYS_TRANS_HALF_TOPIC', 'b' || printf('%09d', n), 0, 'shop', :headers,
               x'', strftime('%Y-%m-%d %H:%M:%f', 'now') FROM s""",
}
DECIDE = """
    INSERT INTO outbox_op (transaction_id, op, decided_by, decided_at)
    SELECT key, 'commit', 'tests', created_at FROM outbox_message WHERE key LIKE 'b%' AND key <= :upto
"""


def fill(engine: Engine, rows: int, *, decided: int) -> None:
    """Append so many transactions of group shop, each with one message; the oldest of them are committed."""
    headers = '{"REAL_TOPIC":"orders","outbox-verdict":"listener","outbox-headers":"{}"}'
    with engine.begin() as connection:
        connection.execute(text(BULK[engine.dialect.name]), {"rows": rows, "headers": headers})
        connection.execute(text(DECIDE), {"upto": f"b{decided:09}"})
