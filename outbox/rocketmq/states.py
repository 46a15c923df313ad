"""States and results, by the names that RocketMQ's clients give them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outbox.store.transactions.op import Op


class LocalTransactionState(Enum):
    """What a local transaction came to, in the words of RocketMQ's 4.x client, its spelling included."""

    COMMIT_MESSAGE = "commit"
    ROLLBACK_MESSAGE = "rollback"
    UNKNOW = "unknown"
    UNKNOWN = UNKNOW


class TransactionResolution(Enum):
    """The same in the words of the 5.x client."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class SendStatus(Enum):
    """How a half message was stored. There is one way here: what is not stored durably raises instead."""

    SEND_OK = "SEND_OK"


@dataclass(frozen=True, slots=True)
class MessageQueue:
    """A queue of a topic; the queues are the slots of the outbox."""

    topic: str
    queue_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionSendResult:
    """What `send_message_in_transaction` brought.

    `local_transaction_state` is the one that is recorded: UNKNOW where the local transaction brought none, or where its
    state could not be written (`error` says why), so that check-back decides. `queue_offset` is the place of the half
    message in the log, and `message_queue` is where its message will go.
    """

    send_status: SendStatus
    message_queue: MessageQueue
    msg_id: str
    queue_offset: int
    transaction_id: str
    local_transaction_state: LocalTransactionState
    error: Exception | None = None


def op_of(state: object) -> Op | None:
    """Return the verdict that a state or a resolution stands for; None for everything else, whatever it is."""
    # By identity: an object of somebody else may be equal to anything.
    if state is LocalTransactionState.COMMIT_MESSAGE or state is TransactionResolution.COMMIT:
        return "commit"
    if state is LocalTransactionState.ROLLBACK_MESSAGE or state is TransactionResolution.ROLLBACK:
        return "rollback"
    return None
