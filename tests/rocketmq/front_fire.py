"""Fronts that are killed, and their clients. Run with a JSON object, the fields of `Task`.

Clients are by hand: they repeat a call with the same ids until somebody answers, at one front after the other. Push
consumers are of the official client.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from uuid import uuid4

import grpc

from outbox import Outbox, create_engine
from outbox.rocketmq.checker import CheckPolicy
from outbox.rocketmq.front import Front
from outbox.rocketmq.front.calls import Call
from outbox.rocketmq.front.protocol import RPCS, SERVICE, kind, numbers
from outbox.rocketmq.front.sending import Sending
from outbox.rocketmq.front.statuses import NO_TRANSACTION, Code, status
from outbox.runtime import failpoints
from tests.rocketmq.front_judge import ANSWERS, Acked, Asked, Ended, Event, Got, Half, Sent, fate
from tests.support.records import RecordFile
from tests.support.waiting import eventually

CLIENTS = ("producers", "consumers", "push consumers")
TOPICS: Any = {
    "orders": "NORMAL", "steps": "FIFO", "paid": "TRANSACTION", "unread": "NORMAL", "pushed": "NORMAL",
    "failing": "NORMAL",
}  # fmt: skip
GROUPS = {"orders": "readers", "paid": "readers", "steps": "walkers", "unread": "idlers"}
PUSH_GROUPS = {"pushed": "listeners", "failing": "failures"}
DEADLY_GROUPS = (GROUPS["unread"], PUSH_GROUPS["failing"])
#: The topics of messages that are no transactions.
_TOPICS_OF_FATES = {"plain": "orders", "step": "steps", "never": "unread", "push": "pushed", "fail": "failing"}
FATES = (
    "plain", "plain", "step", "step", "commit", "rollback", "torn", "orphan+", "orphan-", "push", "push", "never",
    "fail",
)  # fmt: skip
IMMUNITY, INTERVAL = timedelta(seconds=1), timedelta(seconds=0.7)
#: Where a front dies or stops when it is told to do so soon.
POINTS = (
    "outbox.after_insert", "outbox.before_commit", "outbox.after_commit", "half.after_prepare", "half.before_end",
    "half.before_restore", "half.after_end", "pop.before_write", "pop.before_commit", "pop.after_commit",
    "relay.before_send", "relay.after_send", "worker.before_settle", "worker.after_settle",
)  # fmt: skip
_POINT_SECONDS = 3.0
DIES_SOON, STOPS_SOON = signal.SIGUSR1, signal.SIGUSR2
#: The shortest time that RocketMQ allows.
INVISIBLE_SECONDS = 10.0
#: Of a push consumer: the call before a delivery, the time of a message, and the pause after the first failure.
LONG_POLL_SECONDS, RENEWED_SECONDS, FIRST_PAUSE_SECONDS = 30.0, 60.0, 1.0
#: Seconds for an answer, after which a client asks another front, and until a client gives up for good.
_ANSWER_SECONDS, _PATIENCE_SECONDS = 4.0, 300.0
_AGAIN, _FORGOTTEN, _SILENT = 0.2, 0.05, 0.3
_MUTE = 0.01
_Message, _Entry = kind("Message"), kind("AckMessageEntry")
_RESOLUTIONS, _KINDS = numbers("TransactionResolution"), numbers("MessageType")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to do. `ports`: of the fronts; a front serves at the first one. `hasty`: a front answers before its commit.

    Files in `folder`: `calm` is there when no front is killed any more, `enough` when clients end.
    """

    role: str
    folder: str
    ports: tuple[int, ...]
    url: str = ""
    lanes: int = 0
    hasty: bool = False

    def has(self, name: str, seconds: float = 0.0) -> bool:
        """Whether there is a file, within so many seconds."""
        return eventually((Path(self.folder) / name).exists, seconds)


class History:
    """The events of all clients, in a file."""

    def __init__(self, folder: str) -> None:
        self._records = RecordFile(Path(folder) / "history")

    def tell(self, event: Event) -> None:
        """Add an event."""
        self._records.append([type(event).__name__, *event])


# Fronts


def serve(task: Task) -> None:
    """Serve until killed."""
    if task.hasty:
        Sending.send = _hasty(Sending.send)  # type: ignore[method-assign]
    front = Front(
        Outbox(create_engine(task.url)),
        topics=TOPICS,
        fifo_groups=[GROUPS["steps"]],
        listen=f"127.0.0.1:{task.ports[0]}",
        policy=CheckPolicy(transaction_timeout=IMMUNITY, check_interval=INTERVAL),
    )
    for told, then in ((DIES_SOON, signal.SIGKILL), (STOPS_SOON, signal.SIGSTOP)):
        signal.signal(told, partial(_ends_soon, task, then))
    front.run()


def _ends_soon(task: Task, number: signal.Signals, *_: object) -> None:
    """Let this process get a signal as soon as it is at one of three points, a few seconds later at any point."""
    points, until = random.sample(POINTS, 3), time.monotonic() + _POINT_SECONDS

    def reached(name: str) -> None:
        if name in points or time.monotonic() > until:
            failpoints.arm(None)
            with (Path(task.folder) / "points").open("a") as file:
                file.write(f"{name}\n")
            os.kill(os.getpid(), number)

    failpoints.arm(reached)


def _hasty(send: Any) -> Any:
    """Return a twin of `send` that answers at once, and stores a second later."""
    tasks = set()

    def store(self: Sending, call: Call, request: Any) -> None:
        tasks.add(asyncio.ensure_future(send(self, call, request)))

    async def hasty(self: Sending, call: Call, request: Any) -> Any:
        if request.messages[0].topic.name == "paid":
            return await send(self, call, request)
        asyncio.get_running_loop().call_later(1, store, self, call, request)
        answer = RPCS["SendMessage"].response(status=status())
        answer.entries.add(status=status(), message_id=request.messages[0].system_properties.message_id)
        return answer

    return hasty


# Clients


class Client:
    """A client by hand, which has a connection to one of the fronts at a time."""

    def __init__(self, task: Task, id: str, number: int) -> None:
        """`number`: chooses the first front."""
        self.task, self._id = task, id
        self._places = itertools.cycle(task.ports[number % len(task.ports) :] + task.ports[: number % len(task.ports)])
        self._channel: grpc.Channel | None = None

    def call(self, name: str, request: Any) -> Any:
        """Make a call until there is a final answer: repeated after errors of the connection and of the database.

        Raises:
            TimeoutError: there is none in minutes.
        """
        ends, answer = time.monotonic() + _PATIENCE_SECONDS, None
        while time.monotonic() < ends:
            with suppress(grpc.RpcError):
                answer = self.once(name, request)
                if answer.status.code != Code.INTERNAL_SERVER_ERROR or NO_TRANSACTION in answer.status.message:
                    return answer
                logger.info("%s: %s", name, answer.status.message[:300])
            self.task.has("enough", 0.1)
        raise TimeoutError(f"no front answers {name}: {answer}")

    def once(self, name: str, request: Any) -> Any:
        """Make a call once; after an error the next one goes to the next front."""
        rpc, channel = RPCS[name], self._open()
        make = channel.unary_stream if rpc.streams_out else channel.unary_unary
        ask = make(f"/{SERVICE}/{name}", rpc.request.SerializeToString, rpc.response.FromString)
        try:
            answer = ask(request, timeout=_ANSWER_SECONDS, metadata=self._metadata)
            return list(answer) if rpc.streams_out else answer
        except grpc.RpcError:
            self.close()
            raise

    def stream(self, commands: Iterator[Any]) -> Any:
        """Open a stream."""
        rpc = RPCS["Telemetry"]
        opened = self._open().stream_stream(
            f"/{SERVICE}/Telemetry", rpc.request.SerializeToString, rpc.response.FromString
        )
        return opened(commands, metadata=self._metadata)

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-mq-client-id", self._id),)

    def _open(self) -> grpc.Channel:
        if self._channel is None:
            # Else the channels of a process share connections, and wait for one that was refused.
            options = [("grpc.use_local_subchannel_pool", 1)]
            self._channel = grpc.insecure_channel(f"127.0.0.1:{next(self._places)}", options)
        return self._channel


class Producer:
    """Sends messages of all fates, one after the other, and answers questions about everybody's transactions."""

    def __init__(self, task: Task, number: int, history: History) -> None:
        self._task, self._number, self._history = task, number, history
        id = f"producer {number} {uuid4().hex}"
        self._client, self._hearing = Client(task, id, number), Client(task, id, number)
        # Another client may end a transaction, too.
        self._other, self._answering = (Client(task, f"{name} of {id}", number + 1) for name in ("other", "answers"))
        self._random = random.Random()
        self._questions = SimpleQueue[Any]()

    def produce(self) -> None:
        """Send until no front is killed any more."""
        for number in itertools.count():
            if self._task.has("calm", self._random.uniform(0, 0.2)):
                return
            chosen = "mute" if self._random.random() < _MUTE else self._random.choice(FATES)
            name = f"{self._number}/{number}/{chosen}"
            if chosen in ANSWERS:
                self._transact(name)
            else:
                self._send(name)
                self._history.tell(Sent(name))

    def _send(self, name: str) -> Any:
        """Send a message until the answer is OK, sometimes again; return the answer."""
        chosen = fate(name)
        message = _Message(body=name.encode())
        system = message.system_properties
        system.message_id = f"01{uuid4().hex.upper()}"
        system.born_timestamp.GetCurrentTime()
        system.born_host = "born-host"
        if chosen == "step":
            system.message_group = f"producer {self._number}"
        message.topic.name = _TOPICS_OF_FATES.get(chosen, "paid")
        system.message_type = _KINDS[TOPICS[message.topic.name]]
        request = RPCS["SendMessage"].request(messages=[message])
        answer = self._client.call("SendMessage", request)
        if self._random.random() < _AGAIN:
            self._client.call("SendMessage", request)
        assert answer.status.code == Code.OK or chosen in ANSWERS, answer.status.message
        return answer

    def _transact(self, name: str) -> None:
        answer, chosen = self._send(name), fate(name)
        if answer.status.code != Code.OK:
            assert NO_TRANSACTION in answer.status.message, answer.status.message  # was asked about meanwhile
            return
        self._history.tell(Half(name, time.monotonic()))
        transaction = answer.entries[0].transaction_id
        if chosen in ("commit", "rollback"):
            self._end(self._client, name, transaction, chosen)
        elif chosen == "torn":
            both = ((self._client, "commit"), (self._other, "rollback"))
            in_threads(*(partial(self._end, by, name, transaction, op) for by, op in both))

    def _end(self, client: Client, name: str, transaction: str, op: str, *, asked: bool = False) -> None:
        request = RPCS["EndTransaction"].request(
            message_id=transaction,
            transaction_id=transaction,
            resolution=_RESOLUTIONS[op.upper()],
            source=numbers("TransactionSource")["SOURCE_SERVER_CHECK" if asked else "SOURCE_CLIENT"],
        )
        request.topic.name = "paid"
        if client.call("EndTransaction", request).status.code == Code.OK:
            self._history.tell(Ended(name, op))

    # Questions

    def hear(self) -> None:
        """Hear questions; after a break of the stream some producers send no settings again."""
        for round in itertools.count():
            if self._task.has("enough", 0.2):
                self._questions.put(None)
                return
            commands = SimpleQueue[Any]()
            if round == 0 or self._number % 2 == 0:
                command = RPCS["Telemetry"].request()
                command.settings.client_type = numbers("ClientType")["PRODUCER"]
                command.settings.publishing.topics.add(name="paid")
                commands.put(command)
            # The iterator is left in a thread of grpc's until it ends.
            stream = self._hearing.stream(iter(commands.get, None))
            ends = threading.Thread(target=self._end_with, args=(stream,), daemon=True)
            ends.start()
            with suppress(grpc.RpcError):
                for answer in stream:
                    if answer.HasField("recover_orphaned_transaction_command"):
                        question = answer.recover_orphaned_transaction_command
                        self._history.tell(Asked(question.message.body.decode(), time.monotonic()))
                        self._questions.put(question)
            commands.put(None)
            self._hearing.close()

    def _end_with(self, stream: Any) -> None:
        while stream.is_active() and not self._task.has("enough", 0.2):
            pass
        stream.cancel()

    def answer(self) -> None:
        """Answer most questions; meanwhile others are heard, which would be gone with the connection."""
        while (question := self._questions.get()) is not None:
            name = question.message.body.decode()
            op = ANSWERS[fate(name)]
            if op is not None and self._random.random() > _SILENT:
                self._end(self._answering, name, question.transaction_id, op, asked=True)


def consume(task: Task, number: int, history: History) -> None:
    """Receive from all topics by turns, and acknowledge; some messages are forgotten when they come first."""
    client, chance = Client(task, f"consumer {number} {uuid4().hex}", number), random.Random()
    for topic in itertools.cycle(GROUPS):
        if task.has("enough"):
            return
        request = RPCS["ReceiveMessage"].request(
            group={"name": GROUPS[topic]},
            message_queue={"topic": {"name": topic}},
            filter_expression={"type": numbers("FilterType")["TAG"], "expression": "*"},
            batch_size=16,
            invisible_duration={"seconds": int(INVISIBLE_SECONDS)},
            long_polling_timeout={"seconds": 1},
        )
        began = time.monotonic()
        try:
            answers = client.once("ReceiveMessage", request)
        except grpc.RpcError:
            task.has("enough", 0.1)
            continue
        at, call = time.monotonic(), uuid4().hex
        entries: dict[str, Any] = {}
        for each in (answer.message for answer in answers if answer.HasField("message")):
            name, system = each.body.decode(), each.system_properties
            checks = int(each.user_properties.get("TRANSACTION_CHECK_TIMES", 0))
            history.tell(Got(name, call, began, at, INVISIBLE_SECONDS, checks))
            if topic != "unread" and (system.delivery_attempt > 1 or chance.random() > _FORGOTTEN):
                entries[name] = _Entry(message_id=system.message_id, receipt_handle=system.receipt_handle)
        if entries:
            _ack(client, topic, entries, history)


def _ack(client: Client, topic: str, entries: dict[str, Any], history: History) -> None:
    request = RPCS["AckMessage"].request(group={"name": GROUPS[topic]}, entries=entries.values())
    request.topic.name = topic
    began = time.monotonic()
    answer = client.call("AckMessage", request)
    now = time.monotonic()
    for name, entry in zip(entries, answer.entries, strict=True):
        history.tell(Acked(name, began, now if entry.status.code == Code.OK else None))


def listen(task: Task, number: int, history: History) -> None:
    """Let push consumers of the official client listen: one whose listener succeeds, and one whose listener fails."""
    client = importlib.import_module("rocketmq")
    place = client.ClientConfiguration(f"127.0.0.1:{task.ports[number % len(task.ports)]}", client.Credentials())
    consumers = []
    for topic, group in PUSH_GROUPS.items():
        listener = _listener(client, history, succeeds=topic == "pushed")
        consumer = client.PushConsumer(place, group, listener, {topic: client.FilterExpression()})
        # A start fails while the front is away.
        while not _starts(consumer) and not task.has("enough", 1):
            pass
        consumers.append(consumer)
    while not task.has("enough", 1):
        pass
    for consumer in consumers:
        consumer.shutdown()


def _starts(consumer: Any) -> bool:
    try:
        consumer.startup()
    except Exception:
        logger.exception("a push consumer did not start")
        return False
    return True


def _listener(client: Any, history: History, *, succeeds: bool) -> Any:
    def consume(_self: Any, message: Any) -> Any:
        name, now = message.body.decode(), time.monotonic()
        if not succeeds:
            history.tell(Got(name, message.receipt_handle, now, now, FIRST_PAUSE_SECONDS, 0))
            return client.ConsumeResult.FAILURE
        history.tell(Got(name, message.receipt_handle, now - LONG_POLL_SECONDS, now, RENEWED_SECONDS, 0))
        # Nobody tells the listener of the answer.
        history.tell(Acked(name, now, None))
        return client.ConsumeResult.SUCCESS

    return type("Listener", (client.MessageListener,), {"consume": consume})()


def in_threads(*works: Callable[[], None]) -> None:
    """Do all of it at once.

    Raises:
        AssertionError: one of them has failed; its error is in the log.
    """
    failed: list[BaseException] = []

    def do(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            logger.exception("a client failed")
            failed.append(error)

    threads = [threading.Thread(target=do, args=(work,)) for work in works]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed


def main(task: Task) -> None:
    """Do it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    if task.role == "front":
        return serve(task)
    history = History(task.folder)
    if task.role == "producers":
        producers = [Producer(task, number, history) for number in range(task.lanes)]
        return in_threads(*(work for each in producers for work in (each.produce, each.hear, each.answer)))
    if task.role == "push consumers":
        os.environ["HOME"] = task.folder  # the official client writes its log there, from the import on
    work = listen if task.role == "push consumers" else consume
    return in_threads(*(partial(work, task, number, history) for number in range(task.lanes)))


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    main(Task(**fields | {"ports": tuple(fields["ports"])}))
