"""RocketMQ's model on the same log: producers, transactional messages with check-back, and consumers."""

from outbox.errors import MQClientError, VerdictStandsError
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.consuming import (
    ConsumeConcurrentlyContext,
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    MessageListenerConcurrently,
    MessageListenerOrderly,
    MessageModel,
)
from outbox.rocketmq.dead_letters import dead_letters
from outbox.rocketmq.default_producer import DefaultMQProducer, split_batch
from outbox.rocketmq.expressions import MessageSelector
from outbox.rocketmq.listener import TransactionChecker, TransactionListener
from outbox.rocketmq.message_ext import MessageExt
from outbox.rocketmq.producer import TransactionMQProducer
from outbox.rocketmq.push_consumer import DefaultMQPushConsumer
from outbox.rocketmq.selectors import (
    MessageQueueSelector,
    SelectMessageQueueByHash,
    SelectMessageQueueByRandom,
)
from outbox.rocketmq.simple_consumer import SimpleConsumer
from outbox.rocketmq.states import (
    LocalTransactionState,
    MessageQueue,
    NobodyAsked,
    SendResult,
    SendStatus,
    TransactionResolution,
    TransactionSendResult,
)
from outbox.rocketmq.transaction import Transaction

__all__ = [
    "CheckPolicy", "ConsumeConcurrentlyContext", "ConsumeConcurrentlyStatus", "ConsumeFromWhere",
    "ConsumeOrderlyContext", "ConsumeOrderlyStatus", "DefaultMQProducer", "DefaultMQPushConsumer",
    "LocalTransactionState", "MQClientError", "MessageExt", "MessageListenerConcurrently", "MessageListenerOrderly",
    "MessageModel", "MessageQueue", "MessageQueueSelector", "MessageSelector", "NobodyAsked",
    "SelectMessageQueueByHash", "SelectMessageQueueByRandom", "SendResult", "SendStatus", "SimpleConsumer",
    "Transaction", "TransactionChecker", "TransactionListener", "TransactionMQProducer", "TransactionResolution",
    "TransactionSendResult", "VerdictStandsError", "dead_letters", "split_batch",
]  # fmt: skip
