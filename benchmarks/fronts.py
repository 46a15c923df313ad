"""RocketMQ's official client at a front, against the same client at a RocketMQ 5.5: both with their defaults.

The client, in Python, is a process of its own in each turn; the front is another one, and its PostgreSQL a third. The
RocketMQ is two Java machines. It answers when a message is in the memory of its system, and PostgreSQL when it is on
the disk.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

from benchmarks.arrivals import Arrivals, differences, quantile, running
from benchmarks.latency import evenly, write_by
from benchmarks.measure import Goal, Measurement, Turns, at_least, at_most
from benchmarks.site import Site
from outbox import Outbox, create_engine
from outbox.rocketmq.front import Front
from outbox.rocketmq.front.routing import TopicType
from tests.support.servers.rocketmq import RocketServer

#: Threads that send at once with one producer.
_SENDERS = 8
_TOPICS: dict[str, TopicType] = {"orders": "NORMAL", "paid": "TRANSACTION", "pushed": "NORMAL"}
_BODY = b"." * 300
_PATIENCE = 60.0

#: Uses the client at a place; returns the figure.
Work = Callable[[str], float]


def front_vs_broker(site: Site) -> list[Measurement]:
    """RocketMQ's client at a front against a RocketMQ: msg/s of 8 threads, transactions/s, ms to a push consumer."""
    scale = site.scale
    rows: list[tuple[Turns, Goal, str, Work]] = [
        (Turns("front_send_vs_broker"), at_least(0.3), "msg/s", partial(_sent, count=scale.sent_by_client)),
        (Turns("front_transactions_vs_broker"), at_least(0.3), "tx/s", partial(_ended, count=scale.ended_by_client)),
        (Turns("front_push_latency_p50"), at_most(3), "ms", partial(_pushed, count=scale.latency_messages)),
    ]
    server = RocketServer(topics=_TOPICS, groups={"billing": {}}, settings={}, java=())
    with server, site.place() as place, running(_front, place.url) as pipe:
        ours = pipe.recv()
        for _, _, _, work in rows:
            # The first use of a server pays for what is made once, and Java for its compiler.
            _by_client(ours, work), _by_client(server.place, work)
        for _ in range(scale.rounds):
            for turns, _, _, work in rows:
                turns.add(_by_client(ours, work), _by_client(server.place, work))
        pipe.send("stop")
    return [
        Measurement(name=turns.name, goal=goal, unit=unit, ours=turns.ours, other=turns.other)
        for turns, goal, unit, _ in rows
    ]


def _front(url: str, pipe: Pipe) -> None:
    with Front(Outbox(create_engine(url)), topics=_TOPICS, listen="127.0.0.1:0") as front:
        pipe.send(str(front.listening))
        pipe.recv()


def _by_client(place: str, work: Work) -> float:
    with running(partial(_client, work=work), place) as pipe:
        figure: float = pipe.recv()
    return figure


def _client(place: str, pipe: Pipe, *, work: Work) -> None:
    with tempfile.TemporaryDirectory() as home:
        # The client writes its log below the home folder, from its import on.
        os.environ["HOME"] = home
        pipe.send(work(place))


def _sent(place: str, count: int) -> float:
    """Messages a second."""
    with _producing(place, "orders") as producer:
        return _rate(count, lambda: producer.send(_message("orders")))


def _ended(place: str, count: int) -> float:
    """Transactions a second, each of a half message and its commit."""
    with _producing(place, "paid") as producer:

        def end() -> None:
            transaction = producer.begin_transaction()
            producer.send(_message("paid"), transaction)
            transaction.commit()

        return _rate(count, end)


def _rate(count: int, action: Callable[[], object]) -> float:
    """How often a second threads do something."""
    with ThreadPoolExecutor(_SENDERS) as threads:
        list(threads.map(lambda _: action(), range(_SENDERS)))
        started = time.perf_counter()
        list(threads.map(lambda _: action(), range(count)))
        return count / (time.perf_counter() - started)


def _pushed(place: str, count: int) -> float:
    """Milliseconds from the call of send to the call of the listener, at 50 a second: the median."""
    import rocketmq

    arrived: Arrivals = {}
    has_come = threading.Event()

    class Listener(rocketmq.MessageListener):  # type: ignore[misc]
        def consume(self, message: Any) -> Any:
            arrived[message.body] = time.monotonic_ns()
            has_come.set()
            return rocketmq.ConsumeResult.SUCCESS

    topics = {"pushed": rocketmq.FilterExpression()}
    consumer = rocketmq.PushConsumer(_configuration(place), "billing", Listener(), topics)
    consumer.startup()
    with _producing(place, "pushed") as producer:

        def write(body: bytes) -> int:
            at = time.monotonic_ns()
            producer.send(_message("pushed", body))
            return at

        write(b"warm-up")
        if not has_come.wait(_PATIENCE):
            raise RuntimeError("no message arrives")
        sent = write_by(evenly(count), write)
    consumer.shutdown()
    return quantile(differences(sent, arrived), 0.5)


@contextmanager
def _producing(place: str, topic: str) -> Iterator[Any]:
    import rocketmq

    class Checker(rocketmq.TransactionChecker):  # type: ignore[misc]
        def check(self, message: Any) -> Any:
            return rocketmq.TransactionResolution.COMMIT

    producer = rocketmq.Producer(_configuration(place), [topic], Checker())
    producer.startup()
    yield producer
    producer.shutdown()


def _configuration(place: str) -> Any:
    import rocketmq

    return rocketmq.ClientConfiguration(place, rocketmq.Credentials())


def _message(topic: str, body: bytes = _BODY) -> Any:
    import rocketmq

    message = rocketmq.Message()
    message.topic, message.body = topic, body
    return message
