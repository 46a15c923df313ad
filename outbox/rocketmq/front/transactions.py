"""Transactions of clients: half messages, verdicts, and questions to the producers of a topic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from zlib import crc32

from outbox.errors import MQClientError, VerdictStandsError
from outbox.model.limits import stored_headers
from outbox.model.message import TRANSACTION_ID, Message
from outbox.model.slots import slot_of
from outbox.rocketmq.broker import Broker
from outbox.rocketmq.front.calls import THREADS, Call, Threads
from outbox.rocketmq.front.clients import Clients
from outbox.rocketmq.front.conversion import id_of, stored, wire_of
from outbox.rocketmq.front.protocol import RPCS, Wire, duration_of, numbers
from outbox.rocketmq.front.statuses import Code, RefusedError, internal, status
from outbox.rocketmq.states import NobodyAsked, TransactionResolution
from outbox.store.half_messages.half import Half
from outbox.store.half_messages.op import Op
from outbox.writing.bare import BareOutbox

_Ended = RPCS["EndTransaction"].response
_Command = RPCS["Telemetry"].response
_RESOLUTIONS = numbers("TransactionResolution")
_OPS: Mapping[int, Op] = {_RESOLUTIONS["COMMIT"]: "commit", _RESOLUTIONS["ROLLBACK"]: "rollback"}
#: RocketMQ's one text for a transaction that cannot be ended as asked.
_NOT_FOUND = "cannot found transaction data"


class Transactions:
    """The transactions of a front. The topic is the producer group, as in RocketMQ 5: any producer of it is asked."""

    def __init__(self, outbox: BareOutbox, clients: Clients, immunity: timedelta, threads: Threads) -> None:
        """`immunity`: the age below which no producer is asked about a transaction."""
        self.broker = Broker(outbox, connections=THREADS)
        self._slots = outbox.database.slots
        self._clients = clients
        self._immunity = immunity
        self._threads = threads

    def prepare(self, wire: Wire) -> None:
        """Store a half message. The transaction has the id of the message.

        A message that is sent again is stored again, and delivered once.
        """
        message = stored(wire)
        transaction = id_of(message)
        recovery = wire.system_properties.orphaned_transaction_recovery_duration
        seconds = math.ceil(duration_of(recovery).total_seconds())
        half = Half(
            transaction=transaction,
            group=message.topic,
            way="listener",
            immunity=timedelta(seconds=seconds) if seconds > 0 else None,
        )
        headers = stored_headers({**message.headers, TRANSACTION_ID: transaction})
        self.broker.declare(half.group, self._immunity)
        try:
            self.broker.prepare(half, message, slot_of(message.key, self._slots), headers)
        except VerdictStandsError as error:
            # The answer to an earlier try was lost, and meanwhile the transaction was ended.
            if error.verdict != "commit":
                raise internal(_NOT_FOUND, str(error)) from error

    async def end(self, call: Call, request: Wire) -> Wire:
        """Write the verdict on a transaction; any client may."""
        if not request.transaction_id:
            raise RefusedError(Code.INVALID_TRANSACTION_ID, "transaction id cannot be empty")
        op = _OPS.get(request.resolution)
        if op is not None:
            ending = _Ending(self.broker, request.transaction_id, op, request.topic.name, f"client {call.client}")
            await self._threads.run(ending.write)
        return _Ended(status=status())

    def ask(self, message: Message) -> object:
        """Ask a producer of the topic. The answer comes as a verdict, on any front, so none is known now."""
        command = _Command(status=status())
        question = command.recover_orphaned_transaction_command
        question.message.CopyFrom(wire_of(message, "TRANSACTION"))
        question.message.system_properties.delivery_attempt = 1
        question.transaction_id = id_of(message)
        # The attempt is counted for each transaction, so each question about it meets the next producer.
        turn = crc32(id_of(message).encode()) + message.attempt
        if self._clients.ask(message.topic, command, turn=turn):
            return TransactionResolution.UNKNOWN
        return NobodyAsked(f"no producer of topic {message.topic} has a stream to this front")

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

    def write(self) -> None:
        """Write the verdict, unless it stands already."""
        try:
            self.broker.end(self.transaction, self.op, by=self.by, group=self.topic)
        except MQClientError as error:
            raise internal(_NOT_FOUND) from error
        except VerdictStandsError as error:
            raise internal(_NOT_FOUND, str(error)) from error
