"""Metrics of a front: its calls by code, its clients, its questions, and the messages that it hands out and renews."""

from datetime import timedelta

import grpc
import pytest
from prometheus_client import CollectorRegistry

from outbox import Message, Outbox
from outbox.rocketmq.front.calls import Threads
from outbox.rocketmq.front.clients import Clients
from outbox.rocketmq.front.conversion import stored
from outbox.rocketmq.front.protocol import RPCS, SERVICE
from outbox.rocketmq.front.settings import PRODUCER
from outbox.rocketmq.front.transactions import Transactions
from outbox.telemetry.events import Attended
from outbox.telemetry.metrics import Metrics
from outbox.telemetry.prometheus import PrometheusExporter
from tests.rocketmq.front_probes import message
from tests.rocketmq.fronts import called, listening


@pytest.fixture
def registry(outbox: Outbox) -> CollectorRegistry:
    """A registry with the metrics of the outbox."""
    made = CollectorRegistry()
    outbox.listen(Metrics(PrometheusExporter(made)).told)
    return made


def shown(registry: CollectorRegistry, name: str, label: str = "code") -> dict[tuple[str, ...], float]:
    """The values of a metric of a front, by call or topic and by a label."""
    return {
        tuple(each.labels[part] for part in ("rpc", "topic", label) if part in each.labels): each.value
        for metric in registry.collect()
        for each in metric.samples
        if each.name == f"outbox_front_{name}"
    }


def test_calls_are_counted_by_code_with_their_time_and_with_the_messages_that_they_hand_out(outbox, registry):
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", str(n)) for n in range(2)])
    receive = RPCS["ReceiveMessage"].request(
        group={"name": "billing"},
        message_queue={"topic": {"name": "orders"}},
        batch_size=32,
        invisible_duration={"seconds": 60},
    )
    with listening(outbox) as front:
        called(front, "SendMessage", RPCS["SendMessage"].request(messages=[message("=orders")]))
        called(front, "SendMessage", RPCS["SendMessage"].request())
        called(front, "ReceiveMessage", receive)
        called(front, "ReceiveMessage", RPCS["ReceiveMessage"].request())
        attended = shown(registry, "clients"), shown(registry, "streams")

    assert shown(registry, "calls_total") == {
        ("SendMessage", "OK"): 1, ("SendMessage", "MESSAGE_CORRUPTED"): 1,
        ("ReceiveMessage", "OK"): 1, ("ReceiveMessage", "ILLEGAL_CONSUMER_GROUP"): 1,
    }  # fmt: skip
    assert shown(registry, "call_seconds_count") == {("SendMessage",): 2, ("ReceiveMessage",): 2}
    assert shown(registry, "handed_out_total") == {(): 3}
    assert (attended, shown(registry, "clients")) == (({(): 0}, {(): 0}), {})


class Reading:
    """A stream whose client takes every command."""

    def write(self, _command: object) -> bool:
        """Do as a stream."""
        return True


def test_questions_are_counted_by_whether_a_producer_of_the_topic_is_there(outbox, registry):
    clients, half = Clients(), stored(message("=paid", type_="TRANSACTION"))
    transactions = Transactions(outbox, clients, timedelta(0), threads := Threads(1))

    transactions.ask(half)
    clients.opened("raw", Reading())
    clients.declared("raw", PRODUCER, frozenset({"paid"}))
    counts = clients.counts()
    transactions.ask(half)
    transactions.ask(half)

    transactions.close()
    threads.close()
    assert shown(registry, "questions_total", "outcome") == {("paid", "nobody"): 1, ("paid", "asked"): 2}
    assert counts == (1, 1)


def test_a_stream_counts_as_a_call_at_its_end(outbox, registry):
    with listening(outbox) as front, grpc.insecure_channel(str(front.listening)) as channel:
        rpc = RPCS["Telemetry"]
        talk = channel.stream_stream(f"/{SERVICE}/Telemetry", rpc.request.SerializeToString, rpc.response.FromString)
        for metadata in ([("x-mq-client-id", "raw")], []):
            list(talk(iter([]), metadata=metadata))

    assert shown(registry, "calls_total") == {("Telemetry", "OK"): 1, ("Telemetry", "CLIENT_ID_REQUIRED"): 1}


def test_gauges_of_a_front_end_with_it(outbox, registry):
    for clients, streams, renewals in ((2, 1, 0), (3, 4, 7), (3, 4, 1)):
        outbox.listeners.tell(Attended(database=outbox.database, clients=clients, streams=streams, renewals=renewals))
    during = [shown(registry, name) for name in ("clients", "streams", "renewals_total")]
    outbox.listeners.tell(Attended(database=outbox.database, clients=None, streams=None, renewals=0))

    assert during == [{(): 3}, {(): 4}, {(): 8}]
    assert [shown(registry, name) for name in ("clients", "streams")] == [{}, {}]
