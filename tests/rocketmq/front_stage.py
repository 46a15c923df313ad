"""A stage for probes of a front: what a client by hand sends, receives, acknowledges and is asked."""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from types import ModuleType
from typing import Any

from outbox import Outbox
from outbox.rocketmq.front import Front
from outbox.rocketmq.front.protocol import RPCS, numbers
from tests.rocketmq.front_probes import Wire, fact, message
from tests.support.leases import step_clock
from tests.support.waiting import eventually

#: Fields of a message whose values are those of one run.
_OF_THE_RUN = {
    "receipt_handle",
    "store_host",
    "queue_offset",
    "born_timestamp",
    "store_timestamp",
    "delivery_timestamp",
}
_ENUMS = {"message_type": "MessageType", "body_encoding": "Encoding"}
_AN_ID = re.compile("[0-9A-F]{34}")


class Stage:
    """A front, a client by hand, and the official client."""

    def __init__(self, front: Front, outbox: Outbox, official: ModuleType) -> None:
        self.front, self.official, self._outbox = front, official, outbox
        self.wire, self._other = Wire(front), Wire(front, client="another")

    def close(self) -> None:
        """Close the connections."""
        self.wire.close()
        self._other.close()

    def send(self, *messages: Any) -> dict[str, Any]:
        """Send messages; return the status, and the statuses of several receipts."""
        answer = self.wire.call("SendMessage", messages=messages)
        several = [fact(each) for each in answer.entries] if len(answer.entries) > 1 else []
        return fact(answer) | ({"entries": several} if several else {})

    def half(self, topic: str, label: str, **fields: Any) -> Any:
        """Send a half message with keys and a tag, and the label for a body."""
        made = message(topic, label.encode(), "TRANSACTION", keys=["k1", "k2"], tag="t", **fields)
        assert self.send(made)["code"] == "OK"
        return made

    def end(self, half: Any, verdict: str = "COMMIT", *, by: str = "", **changed: Any) -> dict[str, Any]:
        """End a transaction; return the status."""
        id = half.system_properties.message_id
        asked = {"topic": half.topic, "message_id": id, "transaction_id": id} | changed
        resolution = numbers("TransactionResolution")[verdict]
        return fact((self._other if by else self.wire).call("EndTransaction", resolution=resolution, **asked))

    def receive(
        self, group: str, topic: str, chosen: str = "*", kind: str = "TAG", /, **changed: Any
    ) -> tuple[dict[str, Any], list[Any]]:
        """Receive what is there; return the status and the messages."""
        asked = {
            "group": {"name": group},
            "message_queue": {"topic": {"name": f"oracle_{topic}"}},
            "filter_expression": {"type": numbers("FilterType")[kind], "expression": chosen},
            "batch_size": 16,
            "invisible_duration": {"seconds": 30},
            "long_polling_timeout": {"seconds": 0},
        } | changed
        answers = self.wire.call("ReceiveMessage", **asked)
        return fact(answers[0]), [each.message for each in answers if each.HasField("message")]

    def ack(self, group: str, received: Any, handle: str | None = None) -> dict[str, Any]:
        """Acknowledge a message; return the status, and that of the entry."""
        system = received.system_properties
        entry = {"message_id": system.message_id, "receipt_handle": system.receipt_handle if handle is None else handle}
        answer = self.wire.call("AckMessage", group={"name": group}, topic=received.topic, entries=[entry])
        return fact(answer) | {"entry": fact(answer.entries[0])}

    def drain(self, group: str, topic: str, **changed: Any) -> list[Any]:
        """Receive and acknowledge all messages."""
        found: list[Any] = []
        while more := self.receive(group, topic, **changed)[1]:
            for each in more:
                self.ack(group, each)
            found += more
        return found

    def comes(self, group: str, topic: str, body: bytes) -> list[Any]:
        """Receive and acknowledge all messages, from when there is one with this body on."""
        found: list[Any] = []

        def has_come() -> bool:
            found.extend(self.drain(group, topic))
            return any(each.body == body for each in found)

        assert eventually(has_come)
        return found

    def let_time_pass(self) -> None:
        """Let an hour pass: the time of messages in clients' hands is over, and producers are asked again."""
        for moment in ("outbox_parked.due_at", "outbox_message.created_at"):
            step_clock(self._outbox.engine, timedelta(hours=1), moment)

    def has_questions(self, numbers: list[int], *, given_up: bool = False) -> bool:
        """Whether producers were asked so often about the open transactions, all of which have been looked at."""
        pending = self._outbox.admin.half_transactions(given_up=given_up)
        return sorted(-1 if each.last_answer is None else each.checks for each in pending) == numbers

    @contextmanager
    def producer(self, topic: str, plan: Mapping[str, Sequence[str]]) -> Iterator["Producer"]:
        """A producer that is there until the end of the block."""
        made = Producer(Wire(self.front, client=f"producer of {topic}"), f"oracle_{topic}", plan)
        try:
            yield made
        finally:
            made.close()


class Producer:
    """A client that declares a topic and answers questions, by the body: one answer after the other, the last for ever.

    A message without a plan is rolled back. SILENCE: no answer.
    """

    def __init__(self, wire: Wire, topic: str, plan: Mapping[str, Sequence[str]]) -> None:
        #: The messages of the questions, and those whose answer is stored.
        self.asked: list[Any] = []
        self._answered: list[Any] = []
        self._wire, self._plan = wire, plan
        self._declared = threading.Event()
        self._commands: SimpleQueue[Any] = SimpleQueue()
        command = RPCS["Telemetry"].request()
        command.settings.client_type = numbers("ClientType")["PRODUCER"]
        command.settings.publishing.topics.add(name=topic)
        self._commands.put(command)
        self._hears = threading.Thread(target=self._hear)
        self._hears.start()
        assert self._declared.wait(60)

    def times(self, label: str) -> int:
        """How often the producer was asked about the transaction with a label."""
        return _count(self.asked, label)

    def has_answered(self, label: str) -> bool:
        """True when an answer about the transaction with a label is stored."""
        return _count(self._answered, label) > 0

    def close(self) -> None:
        """End the stream."""
        self._commands.put(None)
        self._hears.join()
        self._wire.close()

    def _hear(self) -> None:
        for command in self._wire.telemetry(iter(self._commands.get, None)):
            if command.HasField("settings"):
                self._declared.set()
            else:
                self._answer(command.recover_orphaned_transaction_command)

    def _answer(self, question: Any) -> None:
        asked, label = question.message, question.message.body.decode()
        self.asked.append(asked)
        plan = self._plan.get(label, ["ROLLBACK"])
        answer = plan[min(self.times(label), len(plan)) - 1]
        if answer != "SILENCE":
            self._wire.call(
                "EndTransaction",
                topic=asked.topic,
                message_id=asked.system_properties.message_id,
                transaction_id=question.transaction_id,
                resolution=numbers("TransactionResolution")[answer],
                source=numbers("TransactionSource")["SOURCE_SERVER_CHECK"],
            )
            self._answered.append(asked)


def _count(messages: Sequence[Any], label: str) -> int:
    return sum(each.body.decode() == label for each in messages)


def shown(received: Any, sent: Any = None) -> dict[str, Any]:
    """A message of a front, without what differs from run to run. `sent`: the message as the client has sent it."""
    system = {field.name: _shown(field.name, value) for field, value in received.system_properties.ListFields()}
    is_as_sent = sent is not None and sent.system_properties.message_id == received.system_properties.message_id
    system["message_id"] = "as sent" if is_as_sent else "other"
    return {
        "topic": received.topic.name,
        "body": received.body.decode(),
        "system": system,
        "user": properties(received),
    }


def properties(received: Any) -> dict[str, str]:
    """The properties of a message, without ids."""
    return {name: _AN_ID.sub("<id>", value) for name, value in received.user_properties.items()}


def _shown(name: str, value: Any) -> Any:
    if name in _OF_THE_RUN:
        return "set"
    if name in _ENUMS:
        return named(_ENUMS[name], value)
    if name == "body_digest":
        return named("DigestType", value.type)
    return list(value) if name == "keys" else value


def named(enum: str, number: int) -> str:
    """The name of a value of the protocol."""
    return next(name for name, each in numbers(enum).items() if each == number)
