"""RocketMQ's transactional messages on the same log: half messages, verdicts that are written once, check-back."""

from outbox.errors import MQClientError, VerdictStandsError
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.listener import TransactionChecker, TransactionListener
from outbox.rocketmq.producer import TransactionMQProducer
from outbox.rocketmq.states import (
    LocalTransactionState,
    MessageQueue,
    SendStatus,
    TransactionResolution,
    TransactionSendResult,
)
from outbox.rocketmq.transaction import Transaction

__all__ = [
    "CheckPolicy", "LocalTransactionState", "MQClientError", "MessageQueue", "SendStatus", "Transaction",
    "TransactionChecker", "TransactionListener", "TransactionMQProducer", "TransactionResolution",
    "TransactionSendResult", "VerdictStandsError",
]  # fmt: skip
