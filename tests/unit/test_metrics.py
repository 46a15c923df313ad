"""The metrics of a process are counted from its events, once a batch, and go to Prometheus as they are."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

from outbox import Message, Reject, Retry, Unavailable, create_engine
from outbox.model.parking import Parking
from outbox.model.verdict import DONE
from outbox.store.database import Database
from outbox.telemetry import events
from outbox.telemetry.metrics import LAG, LOG_ROWS, Metric, Metrics, Sample
from outbox.telemetry.opentelemetry import OpenTelemetryExporter
from outbox.telemetry.prometheus import PrometheusExporter
from tests.support.pages import TOP, blocks

DATABASE = Database(create_engine("postgresql://user:secret@db/shop"), "eu")
WHERE: dict[str, Any] = {"database": DATABASE, "subscription": "relay"}
HERE = "db/shop/eu"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Noted:
    """An exporter that keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, ...]] = []

    def instrument(self, metric: Metric) -> Callable[..., object]:
        """Do as `Exporter.instrument`."""
        return lambda value, *labels: self.values.append((metric.name, value, *labels))

    def observe(self, metrics: Sequence[Metric], samples: Callable[[], Iterable[Sample]]) -> None:
        """Do as `Exporter.observe`."""


def of_prometheus() -> tuple[Metrics, Callable[[], list[tuple[str, float]]]]:
    """Metrics, and what they show of a lease: names and values."""
    registry = CollectorRegistry()
    metrics = Metrics(PrometheusExporter(registry))
    return metrics, lambda: [
        (sample.name, sample.value)
        for family in registry.collect()
        for sample in family.samples
        if sample.name in _OF_A_LEASE
    ]


def of_opentelemetry() -> tuple[Metrics, Callable[[], list[tuple[str, float]]]]:
    """The same by OpenTelemetry."""
    reader = InMemoryMetricReader()
    metrics = Metrics(OpenTelemetryExporter(MeterProvider([reader]).get_meter("outbox")))

    def shown() -> list[tuple[str, float]]:
        data = reader.get_metrics_data()
        found = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        values: dict[str, Any] = {
            each.name.replace(".", "_"): getattr(point, "value", None)
            for each in found
            for point in each.data.data_points
        }
        return [(name, values[name]) for name in _OF_A_LEASE if name in values]

    return metrics, shown


_OF_A_LEASE = ("outbox_destination_up", "outbox_lease_held")


def messages(number: int) -> list[Message]:
    return [Message("orders", b"1") for _ in range(number)]


def noted(*told: events.Event) -> list[tuple[Any, ...]]:
    exporter = Noted()
    metrics = Metrics(exporter)
    for event in told:
        metrics.told(event)
    return exporter.values


def call(*verdicts: Any, destination: str | None = "nats://n/s", error: str | None = None) -> events.HandedOver:
    answers = None if error else list(verdicts)
    number = messages(len(verdicts) or 2)
    return events.HandedOver(
        **WHERE, destination=destination, messages=number, verdicts=answers, error=error, seconds=0.5
    )


def test_a_call_that_sends_counts_by_outcome():
    found = noted(call(DONE, DONE, Retry("no"), Reject("never"), Retry("no")))

    of = ("nats", "send", HERE, "relay")
    assert found == [
        ("messaging.client.sent.messages", 2, *of, ""),
        ("messaging.client.sent.messages", 2, *of, "Retry"),
        ("messaging.client.sent.messages", 1, *of, "Reject"),
        ("messaging.client.operation.duration", 0.5, *of, ""),
        ("outbox.destination.up", 1, HERE, "relay", "nats://n/s"),
    ]


def test_a_call_of_a_function_is_a_process_and_one_that_raises_has_no_verdicts():
    found = noted(call(error="boom", destination=None), call(Unavailable("away"), destination=None))

    of = ("outbox", "process", HERE, "relay")
    assert found == [
        ("messaging.client.consumed.messages", 2, *of, "Exception"),
        ("messaging.process.duration", 0.5, *of, "Exception"),
        ("messaging.client.consumed.messages", 1, *of, "Unavailable"),
        ("messaging.process.duration", 0.5, *of, "Unavailable"),
    ]


def test_a_settle_has_the_lag_of_its_oldest_message_by_the_clock_of_the_database():
    done = messages(2)
    done[0].created_at = NOW - timedelta(seconds=90)

    found = noted(
        events.BatchRead(**WHERE, partition=0, messages=done, now=NOW),
        events.Settled(**WHERE, partition=0, messages=done, seconds=0.25),
    )

    assert found == [
        ("messaging.client.operation.duration", 0.25, "outbox", "settle", HERE, "relay", ""),
        ("outbox.delivery.lag", pytest.approx(90, abs=30), HERE, "relay"),
    ]


def test_leases_outages_retries_and_repetitions():
    away = [events.Outage(topic=None, error="refused", seconds=1.0), events.Outage(topic="a", error="no", seconds=1.0)]
    retry, behind = Parking(state="retry", holds=True), Parking(state="behind", holds=True)
    one, two = messages(2)

    found = noted(
        events.LeaseTaken(**WHERE, partition=3, epoch=9),
        events.LeaseLost(**WHERE, partition=3, epoch=9, error=None),
        events.DestinationAway(**WHERE, destination="nats://n/s", outages=away[1:], pauses=False),
        events.DestinationAway(**WHERE, destination="nats://n/s", outages=away, pauses=True),
        events.DestinationBack(**WHERE, destination="nats://n/s", outage=away[0]),
        events.Parked(**WHERE, partition=3, messages=[(one, retry), (two, behind)]),
        events.Repeated(database=DATABASE, consumer="billing"),
    )

    assert found == [
        ("outbox.lease.takeovers", 1, HERE, "relay"),
        ("outbox.lease.held", 1, HERE, "relay", "3"),
        ("outbox.lease.held", 0, HERE, "relay", "3"),
        ("outbox.lease.held", None, HERE, "relay", "3"),
        ("outbox.destination.up", 0, HERE, "relay", "nats://n/s"),
        ("outbox.destination.up", 1, HERE, "relay", "nats://n/s"),
        ("outbox.retries", 1, HERE, "relay"),
        ("outbox.inbox.repeats", 1, HERE, "billing"),
    ]


AWAY = events.DestinationAway(
    **WHERE,
    destination="nats://n/s",
    outages=[events.Outage(topic=None, error="refused", seconds=1.0)],
    pauses=True,
)


def lease(kind: type[events.LeaseTaken] | type[events.LeaseLost], partition: int) -> events.Event:
    error = {"error": None} if kind is events.LeaseLost else {}
    return kind(**WHERE, partition=partition, epoch=9, **error)  # type: ignore[arg-type]


def test_a_process_without_a_lease_shows_no_destination():
    """It hears no more of the destination. After the next lease it may show the destination again."""
    taken, lost = (lease(kind, 0) for kind in (events.LeaseTaken, events.LeaseLost))

    found = noted(taken, AWAY, lost, taken, call(DONE), lost, taken, call(DONE))

    up = ("outbox.destination.up", HERE, "relay", "nats://n/s")
    values = [value for name, value, *labels in found if (name, *labels) == up]
    assert values == [0, 1, None, 1, None, 1]


def test_a_process_with_another_partition_goes_on_showing_the_destination():
    found = noted(*(lease(events.LeaseTaken, number) for number in (0, 1)), AWAY, lease(events.LeaseLost, 0))

    up = [value for name, value, *_ in found if name == "outbox.destination.up"]
    assert up == [0]


@pytest.mark.parametrize("exporter", [of_prometheus, of_opentelemetry])
def test_gauges_of_a_lease_end_with_the_lease(exporter):
    """Of a backfill, a dropped subscription or a lost partition they would stay for ever, and so would an alert."""
    metrics, shown = exporter()
    during = []
    for event in (lease(events.LeaseTaken, 0), AWAY, lease(events.LeaseLost, 0)):
        metrics.told(event)
        during.append(shown())

    held, up = ("outbox_lease_held", 1.0), ("outbox_destination_up", 0.0)
    assert during == [[held], [up, held], []]


def test_a_page_has_each_metric_once_also_beside_an_exporter_of_the_applications(monkeypatch):
    """A module of `outbox consume` may export as the page about metrics says."""
    shared = CollectorRegistry()
    monkeypatch.setattr("outbox.telemetry.prometheus.REGISTRY", shared)
    theirs, ours = PrometheusExporter(shared), PrometheusExporter()
    for exporter in (theirs, ours):
        Metrics(exporter).told(call(DONE))
    ours.observe([LOG_ROWS], lambda: [Sample(LOG_ROWS, 3, (HERE,))])

    families = [line.split()[2] for line in ours.exposed().decode().splitlines() if line.startswith("# TYPE ")]

    assert sorted(set(families)) == sorted(families)
    assert {"outbox_destination_up", "outbox_log_rows", "messaging_client_sent_messages_total"} <= set(families)


def test_gauges_of_processes_that_are_gone_are_left_out(tmp_path):
    """By the multiprocess mode of Prometheus, which cannot take a series back either: a lost lease shows 0."""
    page = (TOP / "docs" / "metrics.md").read_text()
    (program,) = (block for block in blocks(page, "python") if "MultiProcessCollector" in block)
    script = tmp_path / "gone.py"
    script.write_text(f"""
import os, sys
from prometheus_client import multiprocess, generate_latest
from outbox import create_engine
from outbox.store.database import Database
from outbox.telemetry import events
from outbox.telemetry.metrics import Metrics
from outbox.telemetry.prometheus import PrometheusExporter

class outbox:
    class admin:
        look = None
metrics = Metrics(PrometheusExporter())
where = dict(database=Database(create_engine("sqlite:///never-opened")), subscription="relay", epoch=9)
children = []
for partition in range(3):
    children.append(os.fork())
    if not children[-1]:
        metrics.told(events.LeaseTaken(**where, partition=partition))
        if partition == 1:
            metrics.told(events.LeaseLost(**where, partition=partition, error=None))
        os._exit(0)
    os.waitpid(children[-1], 0)
multiprocess.mark_process_dead(children[2])
{program.replace("outbox.admin.look", "lambda: 1 / 0")}
print(sorted(line.split("partition=")[1].split(",")[0] + line.split("}}")[1]
       for line in generate_latest(registry).decode().splitlines() if line.startswith("outbox_lease_held")))
""")
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)

    assert (ended.stdout, ended.stderr) == ("""['"0" 1.0', '"1" 0.0']\n""", "")


def test_prometheus_shows_them_by_names_and_labels_of_its_own():
    registry = CollectorRegistry()
    metrics = Metrics(PrometheusExporter(registry))
    metrics.told(call(DONE, DONE))
    metrics.told(call(DONE))

    lines = generate_latest(registry).decode().splitlines()

    of = 'messaging_operation_name="send",messaging_system="nats",subscription="relay"}'
    assert f'messaging_client_sent_messages_total{{database="{HERE}",error_type="",{of} 3.0' in lines
    assert f'messaging_client_operation_duration_seconds_sum{{database="{HERE}",error_type="",{of} 1.0' in lines
    assert f'outbox_destination_up{{database="{HERE}",destination="nats://n/s",subscription="relay"}} 1.0' in lines
    assert not any("secret" in line for line in lines)


def test_a_name_that_ends_with_its_unit_has_it_once():
    size = Metric("outbox.log.bytes", "gauge", "By", (), "")

    assert [each.prometheus_name for each in (size, LAG)] == ["outbox_log_bytes", "outbox_delivery_lag_seconds"]
