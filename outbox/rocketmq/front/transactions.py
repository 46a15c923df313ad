"""Transactions of clients: half messages, verdicts, and questions to the producers of a topic."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from zlib import crc32

from outbox.errors import MQClientError, VerdictStandsError
from outbox.model.limits import stored_headers
from outbox.model.message import TRANSACTION_ID, Message
from outbox.model.slots import slot_of
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.front.calls import THREADS, Call, Threads
from outbox.rocketmq.front.clients import Clients
from outbox.rocketmq.front.conversion import id_of, made_id_of, stored, wire_of
from outbox.rocketmq.front.protocol import RPCS, Wire, numbers
from outbox.rocketmq.front.questions import Questions
from outbox.rocketmq.front.statuses import NO_TRANSACTION, internal, status
from outbox.rocketmq.front.validation import checked_topic, checked_transaction, of_another_type
from outbox.rocketmq.states import NobodyAsked, TransactionResolution
from outbox.runtime.text import one_line
from outbox.store.fronts.topics import TopicRows
from outbox.store.half_messages.half import Half
from outbox.store.half_messages.op import Op
from outbox.telemetry.events import Questioned, Teller
from outbox.writing.bare import BareOutbox

_Ended = RPCS["EndTransaction"].response
_Command = RPCS["Telemetry"].response
_RESOLUTIONS = numbers("TransactionResolution")
#: Characters of a client's id that are stored with a verdict.
_MOST_OF_CLIENT = 200
_ANSWERS = numbers("TransactionSource")["SOURCE_SERVER_CHECK"]
#: The number of questions is kept for so many transactions, the last ones.
_MOST_ASKED = 10_000
_OPS: Mapping[int, Op] = {_RESOLUTIONS["COMMIT"]: "commit", _RESOLUTIONS["ROLLBACK"]: "rollback"}


class Transactions:
    """The transactions of a front. The topic is the producer group, as in RocketMQ 5: any producer of it is asked."""

    def __init__(self, outbox: BareOutbox, clients: Clients, immunity: timedelta, threads: Threads) -> None:
        """`immunity`: the age below which no producer is asked about a transaction."""
        self.broker = Broker(outbox, connections=THREADS)
        self._slots = outbox.database.slots
        self._questions = Questions(clients)
        self._teller = Teller(outbox.listeners, {"database": outbox.database})
        self._immunity = immunity
        self._threads = threads
        self._lock = threading.Lock()
        #: How often producers were asked about a transaction, by its id: the messages of a commit say so.
        self._asked: dict[str, int] = {}

    def prepare(self, wire: Wire) -> str:
        """Store a half message, once, and return the id of the transaction: the id of the message.

        If another message has that id, the transaction has an id that is made of the message.
        """
        message = stored(wire)
        # Whole seconds, as RocketMQ takes them.
        seconds = wire.system_properties.orphaned_transaction_recovery_duration.seconds
        immunity = timedelta(seconds=seconds) if seconds > 0 else None
        self.broker.declare(message.topic, self._immunity)
        for transaction in (id_of(message), made_id_of(message)):
            half = Half(transaction=transaction, group=message.topic, way="listener", immunity=immunity)
            headers = stored_headers({**message.headers, TRANSACTION_ID: transaction})
            try:
                if self.broker.prepare_only(half, message, slot_of(message.key, self._slots), headers):
                    return transaction
            except VerdictStandsError as error:
                # The answer to an earlier try was lost, and meanwhile the transaction was ended.
                raise internal(NO_TRANSACTION, str(error)) from error
            self._require_topic(message.topic)
        raise internal(NO_TRANSACTION, f"the transactions {id_of(message)} and {made_id_of(message)} were ended before")

    def _require_topic(self, topic: str) -> None:
        """Refuse a message whose topic was dropped."""
        type_ = self.broker.call(lambda channel: TopicRows(channel).type_of(topic))
        if type_ != "TRANSACTION":
            raise of_another_type(topic, type_, "TRANSACTION")

    async def end(self, call: Call, request: Wire) -> Wire:
        """Write the verdict on a transaction; any client may."""
        topic = checked_topic(request.topic.name)
        transaction = checked_transaction(request.transaction_id)
        op = _OPS.get(request.resolution)
        if op is not None:
            ending = _Ending(self.broker, transaction, op, topic, f"client {one_line(call.client, _MOST_OF_CLIENT)}")
            await self._threads.run(partial(ending.write, self._times(request)))
        return _Ended(status=status())

    def _times(self, request: Wire) -> int | None:
        """Return how often producers were asked, if a verdict is the answer to a question of this front."""
        with self._lock:
            times = self._asked.pop(request.transaction_id, None)
        return times if request.source == _ANSWERS else None

    def ask(self, message: Message) -> object:
        """Ask a producer of the topic. The answer comes as a verdict, on any front, so none is known now."""
        command = _Command(status=status())
        question = command.recover_orphaned_transaction_command
        question.message.CopyFrom(wire_of(message, "TRANSACTION"))
        question.message.system_properties.delivery_attempt = 1
        question.transaction_id = message.transaction_id or id_of(message)
        self._remember(question.transaction_id, message.attempt)
        # The attempt is counted for each transaction, so each question about it meets the next producer.
        turn = crc32(question.transaction_id.encode()) + message.attempt
        asked = self._questions.ask(message.topic, command, turn=turn)
        self._teller.tell(Questioned, topic=message.topic, asked=asked)
        if asked:
            return TransactionResolution.UNKNOWN
        return NobodyAsked(f"no producer of topic {message.topic} has a stream to this front")

    def _remember(self, transaction: str, times: int) -> None:
        with self._lock:
            self._asked.pop(transaction, None)
            self._asked[transaction] = times
            if len(self._asked) > _MOST_ASKED:
                del self._asked[next(iter(self._asked))]

    def close(self) -> None:
        """Close the connections."""
        self.broker.close()


@dataclass(frozen=True, slots=True)
class _Ending:
    """A verdict on a transaction, by a client that names the topic."""

    broker: Broker
    transaction: str
    op: Op
    topic: str
    by: str

    def write(self, asked: int | None) -> None:
        """Write the verdict, unless it stands already; `asked`: as in `Broker.end`."""
        try:
            self.broker.end(self.transaction, self.op, by=self.by, group=self.topic, asked=asked)
        except MQClientError as error:
            raise internal(NO_TRANSACTION) from error
        except VerdictStandsError as error:
            raise internal(NO_TRANSACTION, str(error)) from error
