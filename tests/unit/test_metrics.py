"""The metrics of a process are counted from its events, once a batch, and go to Prometheus as they are."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from outbox import Message, Reject, Retry, Unavailable, create_engine
from outbox.model.parking import Parking
from outbox.model.verdict import DONE
from outbox.store.database import Database
from outbox.telemetry import events
from outbox.telemetry.metrics import LAG, Metric, Metrics, Sample
from outbox.telemetry.prometheus import PrometheusExporter

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


def test_leases_outages_retries_direct_sends_and_repetitions():
    away = [events.Outage(topic=None, error="refused", seconds=1.0), events.Outage(topic="a", error="no", seconds=1.0)]
    retry, blocked = Parking(state="retry", blocks=True), Parking(state="blocked", blocks=True)
    compensation: dict[str, Any] = {**WHERE, "subscription": "relay:compensation"}
    one, two = messages(2)

    found = noted(
        events.LeaseTaken(**WHERE, partition=3, epoch=9),
        events.LeaseLost(**WHERE, partition=3, epoch=9, error=None),
        events.DestinationAway(**WHERE, destination="nats://n/s", outages=away[1:], pauses=False),
        events.DestinationAway(**WHERE, destination="nats://n/s", outages=away, pauses=True),
        events.DestinationBack(**WHERE, destination="nats://n/s", outage=away[0]),
        events.Parked(**WHERE, partition=3, messages=[(one, retry), (two, blocked)]),
        events.SentDirectly(**WHERE, messages=[one, two]),
        events.Settled(**compensation, partition=0, messages=[one], seconds=0.25),
        events.Repeated(database=DATABASE, consumer="billing"),
    )

    assert found == [
        ("outbox.lease.takeovers", 1, HERE, "relay"),
        ("outbox.lease.held", 1, HERE, "relay", "3"),
        ("outbox.lease.held", 0, HERE, "relay", "3"),
        ("outbox.destination.up", 0, HERE, "relay", "nats://n/s"),
        ("outbox.destination.up", 1, HERE, "relay", "nats://n/s"),
        ("outbox.retries", 1, HERE, "relay"),
        ("outbox.direct.sent", 2, HERE, "relay"),
        ("messaging.client.operation.duration", 0.25, "outbox", "settle", HERE, "relay:compensation", ""),
        ("outbox.direct.left_behind", 1, HERE, "relay:compensation"),
        ("outbox.inbox.repeats", 1, HERE, "billing"),
    ]


def test_a_process_without_the_lease_shows_no_outage():
    away = events.Outage(topic=None, error="refused", seconds=1.0)
    lost = events.LeaseLost(**WHERE, partition=0, epoch=9, error=None)
    refused = events.DestinationAway(**WHERE, destination="nats://n/s", outages=[away], pauses=True)

    found = noted(lost, refused, lost, lost, refused)

    up, held = ("outbox.destination.up", HERE, "relay", "nats://n/s"), ("outbox.lease.held", 0, HERE, "relay", "0")
    values = [value for name, value, *labels in found if (name, *labels) == up]
    assert (values, found.count(held)) == ([0, 1, 0], 3)


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
