"""A program with RocketMQ's official Python client, which prints what the client sees at a place, HOST:PORT.

`python -m tests.rocketmq.client_cases HOST:PORT` prints a line for each case, with the facts in JSON. Each case has
topics and groups of its own, so all run at once.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import rocketmq
from rocketmq import FilterExpression, Message, TransactionChecker, TransactionResolution
from rocketmq.grpc_protocol import FilterType

from tests.support.waiting import eventually

#: Topics and their types; consumer groups, and settings of RocketMQ for them.
TOPICS = {
    "py_normal": "NORMAL", "py_async": "NORMAL", "py_refused": "NORMAL", "py_filters": "NORMAL", "py_back": "NORMAL",
    "py_dead": "NORMAL", "py_push": "NORMAL", "py_steps": "FIFO", "py_push_steps": "FIFO", "py_later": "DELAY",
    "py_refused_later": "DELAY", "py_recalled": "DELAY", "py_paid": "TRANSACTION", "py_orphans": "TRANSACTION",
    "py_gone": "TRANSACTION", "py_refused_paid": "TRANSACTION",
}  # fmt: skip
GROUPS: dict[str, dict[str, Any]] = {
    **{f"of_{topic}": {} for topic in TOPICS},
    **{f"of_py_filters_{number}": {} for number in range(8)},
    "of_py_steps": {"consumeMessageOrderly": True},
    "of_py_push_steps": {"consumeMessageOrderly": True},
    "of_py_dead": {"retryMaxTimes": 2},
}
#: What a front adds to a text of RocketMQ.
_OURS = re.compile(r" \[.*\]$", re.DOTALL)
_AN_ID = re.compile("[0-9A-F]{34}")
_MINUTE = 60
#: Seconds within which what is waited for comes.
_PATIENCE = 40


class Client:
    """The official client at a place."""

    def __init__(self, place: str) -> None:
        self._configuration = rocketmq.ClientConfiguration(place, rocketmq.Credentials())

    @contextmanager
    def producer(self, *topics: str, answers: dict[str, list[Any]] | None = None) -> Iterator["Producer"]:
        """A producer, with the answers to questions by body: one after the other, the last for ever."""
        checker = Checker(answers or {})
        made = rocketmq.Producer(self._configuration, list(topics), checker)
        made.startup()
        yield Producer(made, checker)
        made.shutdown()

    @contextmanager
    def consumer(self, topic: str, chosen: Any = None, group: str = "") -> Iterator["Consumer"]:
        """A simple consumer."""
        expression = chosen or FilterExpression()
        made = rocketmq.SimpleConsumer(self._configuration, group or f"of_{topic}", {topic: expression}, 2)
        made.startup()
        yield Consumer(made)
        made.shutdown()

    def pushed(self, topic: str, number: int, fails: str) -> list[Any]:
        """What a push consumer is called with, which fails once for a body."""
        got: list[Any] = []

        class Listener(rocketmq.MessageListener):  # type: ignore[misc]
            def consume(self, message: Any) -> Any:
                body = message.body.decode()
                is_first = all(body != other for other, _ in got)
                got.append([body, message.delivery_attempt])
                done = rocketmq.ConsumeResult
                return done.FAILURE if body == fails and is_first else done.SUCCESS

        topics = {topic: FilterExpression()}
        made = rocketmq.PushConsumer(self._configuration, f"of_{topic}", Listener(), topics)
        made.startup()
        until(lambda: len(got) >= number)
        made.shutdown()
        return got


class Checker(TransactionChecker):  # type: ignore[misc]
    """Answers questions, and keeps their messages."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.asked: list[Any] = []
        self._answers = answers

    def check(self, message: Any) -> Any:
        """Answer the question about a transaction."""
        self.asked.append(message)
        left = self._answers[message.body.decode()]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer == "raises":
            raise RuntimeError
        return answer


class Producer:
    """A producer of the client."""

    def __init__(self, made: Any, checker: Checker) -> None:
        self.made, self.checker = made, checker

    def send(self, topic: str, body: str, **fields: Any) -> Any:
        """Send a message."""
        return self.made.send(message(topic, body, **fields))

    def half(self, topic: str, body: str) -> Any:
        """Begin a transaction with a message."""
        transaction = self.made.begin_transaction()
        self.made.send(message(topic, body), transaction)
        return transaction


class Consumer:
    """A simple consumer of the client."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self._first: list[Any] = []
        # The settings come a moment after the start, and without them the real server fails.
        until(lambda: "NullPointerException" not in said(self._receive_first))

    def some(self, number: int, *, ack: bool = True) -> list[Any]:
        """Receive until so many messages have come."""
        found: list[Any] = []

        def are_there() -> bool:
            found.extend(self._first or self.made.receive(32, _MINUTE))
            self._first = []
            return len(found) >= number

        if number:
            until(are_there)
        for each in found if ack else ():
            self.made.ack(each)
        return found

    def _receive_first(self) -> None:
        self._first = self.made.receive(32, _MINUTE)


def message(topic: str, body: str, **fields: Any) -> Any:
    """A message of the client."""
    made = Message()
    made.topic, made.body = topic, body.encode()
    for name, value in fields.pop("properties", {}).items():
        made.add_property(name, value)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def shown(received: Any) -> dict[str, Any]:
    """A message as a consumer or a checker sees it, without ids and times."""
    names = ("topic", "tag", "message_group", "delivery_attempt", "message_type", "namespace", "corrupted")
    return {
        "body": received.body.decode(),
        "keys": sorted(received.keys),
        "properties": {name: _AN_ID.sub("<id>", value) for name, value in sorted(received.properties.items())},
        "has": [name for name in ("message_id", "born_host", "born_timestamp", "receipt_handle", "delivery_timestamp")
                if getattr(received, name)],
        **{name: getattr(received, name) for name in names},
    }  # fmt: skip


def said(action: Callable[[], Any]) -> str:
    """How a call ends, in a text: an error with its text, without what stands in brackets at the end."""
    try:
        found = action()
    except Exception as error:
        return f"{type(error).__name__}: {_OURS.sub('', str(error))}"
    return ("a message" if found else "nothing") if isinstance(found, list) else "OK"


def until(is_so: Callable[[], bool]) -> None:
    """Wait for a fact."""
    if not eventually(is_so, _PATIENCE):
        raise TimeoutError


def normal(client: Client) -> Iterator[Any]:
    """Send a message with all that it may have, receive and acknowledge it twice."""
    with client.producer("py_normal") as producer, client.consumer("py_normal") as consumer:
        fields = {"tag": "t", "keys": "k", "properties": {"size": "1", "Gr\u00f6\u00dfe": "x"}}
        receipt = producer.send("py_normal", "full", **fields)
        producer.send("py_normal", "bare")
        yield "receipt", len(receipt.message_id), receipt.message_id == receipt.transaction_id, receipt.recall_handle
        full, bare = sorted(consumer.some(2, ack=False), key=lambda each: each.body, reverse=True)
        yield "full", shown(full), full.message_id == receipt.message_id
        yield "bare", shown(bare)
        yield "ack", [said(partial(consumer.made.ack, each)) for each in (full, full, bare)]
        yield "then", said(lambda: consumer.made.receive(32, 10))


def asynchronous(client: Client) -> Iterator[Any]:
    """Send without waiting, and receive without waiting."""
    with client.producer("py_async") as producer, client.consumer("py_async") as consumer:
        sent = [producer.made.send_async(message("py_async", str(number))) for number in range(20)]
        ids = {each.result().message_id for each in sent}
        found: list[Any] = []
        while len(found) < 20:
            found += consumer.made.receive_async(32, _MINUTE).result()
        for each in found:
            consumer.made.ack(each)
        yield "sent", len(ids)
        yield "received", sorted(int(each.body) for each in found), ids == {each.message_id for each in found}


def refusals(client: Client) -> Iterator[Any]:
    """Do what is refused, by the client or by the server."""
    due = int(time.time())
    large = "x" * 4 * 1024 * 1024
    sent = {
        "unknown topic": lambda: message("py_nowhere", "1"),
        "a normal message to another type": lambda: message("py_refused_paid", "1"),
        "a message in order to another type": lambda: message("py_refused", "1", message_group="g"),
        "a late message to another type": lambda: message("py_refused", "1", delivery_timestamp=due + 9),
        "4 MiB": lambda: message("py_refused", large),
        "4 MiB and 1": lambda: message("py_refused", large + "x"),
        "no body": lambda: message("py_refused", ""),
        "25 hours": lambda: message("py_refused_later", "1", delivery_timestamp=due + 25 * 3600),
        "system property": lambda: message("py_refused", "1", properties={"KEYS": "1"}),
        "control character": lambda: message("py_refused", "1", properties={"a": "\x01"}),
        "129 properties": lambda: message("py_refused", "1", properties={f"p{number}": "v" for number in range(129)}),
        "16 KiB of properties": lambda: message("py_refused", "1", properties={"p": "v" * 16384}),
        "blank tag": lambda: message("py_refused", "1", tag=" "),
        "tag with |": lambda: message("py_refused", "1", tag="a|b"),
        "control character in a tag": lambda: message("py_refused", "1", tag="a\x01"),
        "control character in a key": lambda: message("py_refused", "1", keys="a\x01"),
    }
    with client.producer("py_refused", "py_refused_paid", "py_refused_later") as producer:

        def sending(made: Callable[[], Any]) -> None:
            producer.made.send(made())

        for name, each in sent.items():
            yield name, said(partial(sending, each))
        yield "a transaction of another type", said(lambda: producer.half("py_refused", "1"))
        two = producer.half("py_refused_paid", "1")
        yield "two messages", said(lambda: producer.made.send(message("py_refused_paid", "2"), two))
        yield "an empty transaction", said(producer.made.begin_transaction().commit)
        two.rollback()
    with client.consumer("py_refused") as consumer:
        consumer.some(1)
        for seconds in (9, 13 * 3600):
            yield f"receive for {seconds} s", said(partial(consumer.made.receive, 1, seconds))
        for kind, expression in (
            ("TAG", "||"), ("SQL", ""), ("SQL", "a >"), ("SQL", "a != 1"), ("SQL", "a = 'x"), ("SQL", "a IN (1)"),
        ):  # fmt: skip
            consumer.made.subscribe("py_refused", FilterExpression(expression, FilterType.Value(kind)))
            yield f"{kind} {expression}", said(lambda: consumer.made.receive(1, _MINUTE))


def transactions(client: Client) -> Iterator[Any]:
    """End transactions in each way, once and twice."""
    answers = {"orphan": [TransactionResolution.COMMIT]}
    plans = (["commit"], ["rollback"], ["commit"] * 2, ["rollback"] * 2, ["commit", "rollback"], ["rollback", "commit"])
    with client.producer("py_paid", answers=answers) as producer:
        for plan in plans:
            transaction = producer.half("py_paid", ", ".join(plan))
            yield plan, [said(getattr(transaction, verdict)) for verdict in plan]
        producer.half("py_paid", "orphan")
        with client.consumer("py_paid") as consumer:
            found = consumer.some(4)
            yield "received", sorted((shown(each) for each in found), key=lambda each: str(each["body"]))
            yield "then", said(lambda: consumer.made.receive(32, 10))


def orphans(client: Client) -> Iterator[Any]:
    """Leave transactions open, whose checker answers in four ways."""
    resolution = TransactionResolution
    unknown = resolution.Value("TRANSACTION_RESOLUTION_UNSPECIFIED")
    answers = {
        "commit": [resolution.COMMIT],
        "rollback": [resolution.ROLLBACK],
        "unknown twice": [unknown, unknown, resolution.COMMIT],
        "raises": ["raises", resolution.COMMIT],
    }
    with client.producer("py_orphans", answers=answers) as producer:
        for body in answers:
            producer.half("py_orphans", body)
        with client.consumer("py_orphans") as consumer:
            found = consumer.some(3)
            bodies = [each.body.decode() for each in producer.checker.asked]
            yield "asked", {body: bodies.count(body) for body in answers}
            yield "first question", shown(next(each for each in producer.checker.asked if each.body == b"commit"))
            yield "received", sorted((shown(each) for each in found), key=lambda each: str(each["body"]))
            yield "then", said(lambda: consumer.made.receive(32, 10))


def sender_gone(client: Client) -> Iterator[Any]:
    """Leave a transaction open, and let another producer of the topic answer."""
    answers = {"left": [TransactionResolution.COMMIT]}
    with client.producer("py_gone") as gone:
        gone.half("py_gone", "left")
    with client.producer("py_gone", answers=answers) as other, client.consumer("py_gone") as consumer:
        (found,) = consumer.some(1)
        yield "asked", [len(gone.checker.asked), len(other.checker.asked)]
        yield "received", found.body.decode()


def filters(client: Client) -> Iterator[Any]:
    """Receive what tags and conditions choose, with a group for each."""
    with client.producer("py_filters") as producer:
        for number, tag in enumerate("abc", 1):
            producer.send("py_filters", tag, tag=tag, properties={"n": str(number), "s": tag * 2, "yes": "TRUE"})
        producer.send("py_filters", "none")
    chosen = {
        ("TAG", "a"): 1, ("TAG", "a || c"): 2, ("TAG", "*"): 4, ("TAG", "x"): 0,
        ("SQL", "n = 2"): 1, ("SQL", "n BETWEEN 2 AND 3 AND TAGS <> 'c'"): 1, ("SQL", "s IN ('aa', 'cc')"): 2,
        ("SQL", "n IS NULL"): 1,
    }  # fmt: skip
    for number, ((kind, expression), count) in enumerate(chosen.items()):
        choice = FilterExpression(expression, FilterType.Value(kind))
        with client.consumer("py_filters", choice, f"of_py_filters_{number}") as consumer:
            found = sorted(each.body.decode() for each in consumer.some(count))
            yield kind, expression, found, said(lambda: consumer.made.receive(32, 10))


def given_back(client: Client) -> Iterator[Any]:
    """Give a message back, let the time of a message pass, and acknowledge by a stale handle."""
    with client.producer("py_back") as producer, client.consumer("py_back") as consumer:
        producer.send("py_back", "1")
        (first,) = consumer.some(1, ack=False)
        consumer.made.change_invisible_duration(first, 0)
        (second,) = consumer.some(1, ack=False)
        yield "stale", said(lambda: consumer.made.ack(first))
        yield "stale", said(lambda: consumer.made.change_invisible_duration(first, 20))
        yield "prolonged", said(lambda: consumer.made.change_invisible_duration(second, 10))
        (third,) = consumer.some(1, ack=False)
        yield "attempts", [each.delivery_attempt for each in (first, second, third)]
        yield "ids", len({each.message_id for each in (first, second, third)})
        yield "prolonged too long", said(lambda: consumer.made.change_invisible_duration(third, 13 * 3600))
        yield "fresh", said(lambda: consumer.made.ack(third))
        yield "then", said(lambda: consumer.made.receive(32, 10))


def dead_letter(client: Client) -> Iterator[Any]:
    """Give a message back until it does not come again."""
    with client.producer("py_dead") as producer, client.consumer("py_dead") as consumer:
        producer.send("py_dead", "1", tag="t", keys="k")
        attempts = []
        for _ in range(3):
            (found,) = consumer.some(1, ack=False)
            attempts.append(found.delivery_attempt)
            consumer.made.change_invisible_duration(found, 0)
        yield "attempts", attempts
        producer.send("py_dead", "2")
        yield "behind it", [each.body.decode() for each in consumer.some(1)]
        yield "then", [said(lambda: consumer.made.receive(32, 10)) for _ in range(3)]

    with client.consumer("%DLQ%of_py_dead", group="of_py_dead") as consumer:
        yield "the topic of dead letters", said(lambda: consumer.made.receive(32, 10))


def late(client: Client) -> Iterator[Any]:
    """Send for later."""
    with client.producer("py_later") as producer, client.consumer("py_later") as consumer:
        due = int(time.time()) + 3
        receipt = producer.send("py_later", "late", delivery_timestamp=due)
        producer.send("py_later", "past", delivery_timestamp=due - 60)
        yield "handle", bool(receipt.recall_handle)
        found = sorted(consumer.some(2), key=lambda each: bytes(each.body))
        yield "received", [shown(each) for each in found], time.time() > due - 1


def recall(client: Client) -> Iterator[Any]:
    """Take back a message that is for later."""
    with client.producer("py_recalled") as producer, client.consumer("py_recalled") as consumer:
        receipt = producer.send("py_recalled", "1", delivery_timestamp=int(time.time()) + 3)
        for handle in (receipt.recall_handle, "garbage"):
            yield "recall", said(partial(producer.made.recall_message, "py_recalled", handle))
        yield "received", [each.body.decode() for each in consumer.some(1)]


def in_order(client: Client) -> Iterator[Any]:
    """Receive messages of two message groups in order: none comes before its forerunners are acknowledged."""
    with client.producer("py_steps") as producer, client.consumer("py_steps") as consumer:
        for number in range(4):
            for group in "ab":
                producer.send("py_steps", f"{group}{number}", message_group=group)
        got, batches = {"a": "", "b": ""}, []
        while sum(map(len, got.values())) < 8:
            found = consumer.made.receive(2, _MINUTE)
            for each in found:
                got[each.message_group] += each.body.decode()[1]
            batches.append({each.message_group for each in found})
            again = consumer.made.receive(2, _MINUTE)
            batches.append({each.message_group for each in again})
            for each in again:
                got[each.message_group] += each.body.decode()[1]
            for each in found + again:
                consumer.made.ack(each)
        yield "received", got
        yield "message", shown(found[0] if found else again[0])["properties"]


def push(client: Client) -> Iterator[Any]:
    """Be called with messages, and fail once."""
    with client.producer("py_push") as producer:
        for body in "123":
            producer.send("py_push", body)
    yield "called", sorted(client.pushed("py_push", 4, fails="2"))


def push_in_order(client: Client) -> Iterator[Any]:
    """Be called with messages in order, and fail once."""
    with client.producer("py_push_steps") as producer:
        for body in "123":
            producer.send("py_push_steps", body, message_group="g")
    yield "called", client.pushed("py_push_steps", 4, fails="2")


CASES = (
    normal, asynchronous, refusals, transactions, orphans, sender_gone, filters, given_back, dead_letter, late, recall,
    in_order, push, push_in_order,
)  # fmt: skip


def main(place: str, *names: str) -> None:
    """Run all cases, or those with a name."""
    client = Client(place)

    def facts(case: Callable[[Client], Iterator[Any]]) -> list[Any]:
        # The client expects an event loop in the thread that sends.
        asyncio.set_event_loop(asyncio.new_event_loop())
        found: list[Any] = []
        try:
            found.extend(case(client))
        except Exception as error:
            found.append(["broken off", f"{type(error).__name__}: {error}"])
        return found

    chosen = [case for case in CASES if case.__name__ in names or not names]
    with ThreadPoolExecutor(len(chosen)) as threads:
        for case, found in zip(chosen, threads.map(facts, chosen), strict=True):
            print(json.dumps([case.__name__, found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
