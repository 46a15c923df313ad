"""RocketMQ's model on the same log: producers, transactional messages with check-back, and consumers."""

from outbox.errors import MQClientError, VerdictStandsError
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.default_producer import DefaultMQProducer, split_batch
from outbox.rocketmq.listener import TransactionChecker, TransactionListener
from outbox.rocketmq.producer import TransactionMQProducer
from outbox.rocketmq.selectors import (
    MessageQueueSelector,
    SelectMessageQueueByHash,
    SelectMessageQueueByRandom,
)
from outbox.rocketmq.states import (
    LocalTransactionState,
    MessageQueue,
    SendResult,
    SendStatus,
    TransactionResolution,
    TransactionSendResult,
)
from outbox.rocketmq.transaction import Transaction

__all__ = [
    "CheckPolicy", "DefaultMQProducer", "LocalTransactionState", "MQClientError", "MessageQueue",
    "MessageQueueSelector", "SelectMessageQueueByHash", "SelectMessageQueueByRandom", "SendResult", "SendStatus",
    "Transaction", "TransactionChecker", "TransactionListener", "TransactionMQProducer", "TransactionResolution",
    "TransactionSendResult", "VerdictStandsError", "split_batch",
]  # fmt: skip
