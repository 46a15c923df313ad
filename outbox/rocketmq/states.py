"""States and results, by the names that RocketMQ's clients give them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outbox.store.half_messages.op import Op


class LocalTransactionState(Enum):
    """The outcome of a local transaction, in the words of RocketMQ's 4.x client, its spelling included."""

    COMMIT_MESSAGE = "commit"
    ROLLBACK_MESSAGE = "rollback"
    UNKNOW = "unknown"
    UNKNOWN = UNKNOW


class TransactionResolution(Enum):
    """The outcome of a transaction, in the words of RocketMQ's 5.x client."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class NobodyAsked:
    """The answer of a listener that could ask nobody about a transaction, such as a front without a client.

    The answer does not count as an UNKNOWN, and another process of the group is let go first. `reason`: in words.
    """

    reason: str = "nobody could be asked"


class SendStatus(Enum):
    """The outcome of a call that stores messages; a call raises if nothing is stored."""

    SEND_OK = "SEND_OK"


@dataclass(frozen=True, slots=True)
class MessageQueue:
    """A queue of a topic; the queues are the slots of the outbox."""

    topic: str
    queue_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendResult:
    """The result of a `send` in the caller's transaction, on whose commit the messages depend.

    `msg_id`: the message's id; of a batch all ids, joined by commas. `message_queue`: None without a key, because then
    any queue may have the message.
    """

    msg_id: str
    message_queue: MessageQueue | None = None
    send_status: SendStatus = SendStatus.SEND_OK


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionSendResult:
    """The result of `send` and `send_message_in_transaction`.

    `local_transaction_state`: the recorded state; UNKNOW if the local transaction returned no other state, or if its
    state could not be written: then check-back decides. `error`: the reason why the state is not recorded.
    `queue_offset`: the log id of the half message. `message_queue`: the queue to which its message will go.
    """

    send_status: SendStatus
    message_queue: MessageQueue
    msg_id: str
    queue_offset: int
    transaction_id: str
    local_transaction_state: LocalTransactionState
    error: Exception | None = None


def op_of(state: object) -> Op | None:
    """Return the verdict that a state or a resolution stands for; None for any other object."""
    # Compare by identity, because an object of a user's class may be equal to anything.
    if state is LocalTransactionState.COMMIT_MESSAGE or state is TransactionResolution.COMMIT:
        return "commit"
    if state is LocalTransactionState.ROLLBACK_MESSAGE or state is TransactionResolution.ROLLBACK:
        return "rollback"
    return None
