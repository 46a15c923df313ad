"""Spans tell how a message goes from its writer to whoever handles it; metrics go to OpenTelemetry by its API."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outbox import Message, Retry, create_engine
from outbox.model import trace_context
from outbox.model.message import traced
from outbox.model.trace_context import trace_headers
from outbox.model.verdict import DONE
from outbox.store.database import Database
from outbox.telemetry import events
from outbox.telemetry.metrics import DEAD, UNSENT, Metrics, Sample
from outbox.telemetry.opentelemetry import OpenTelemetryExporter, Traces
from outbox.telemetry.processing import processed

WHERE: dict[str, Any] = {"database": Database(create_engine("sqlite:///never-opened")), "subscription": "relay"}


@pytest.fixture
def spans(monkeypatch) -> Iterator[InMemorySpanExporter]:
    """The spans of the global provider, in the order of their ends."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr("outbox.telemetry.opentelemetry.get_tracer", provider.get_tracer)
    trace_context.tracer_of_writers.cache_clear()
    yield exporter
    trace_context.tracer_of_writers.cache_clear()


def written(topic: str = "orders") -> Message:
    """A message with the context of its own span."""
    return Message(topic, b"1", headers=traced({}, trace_headers(topic)))


def told(spans: InMemorySpanExporter, event: events.Event) -> ReadableSpan:
    Traces(trace.get_tracer("outbox")).told(event)
    return spans.get_finished_spans()[-1]


def shown(span: ReadableSpan) -> tuple[str, str, dict[str, Any]]:
    return (
        span.name,
        span.kind.name,
        {name.removeprefix("messaging."): value for name, value in (span.attributes or {}).items()},
    )


def linked(span: ReadableSpan, found: Sequence[ReadableSpan]) -> bool:
    """Whether a span has links to these, and to no other."""
    return [link.context.span_id for link in span.links] == [each.context.span_id for each in found if each.context]


def test_a_message_carries_a_span_of_its_own_below_the_current_one(spans):
    with trace.get_tracer("shop").start_as_current_span("place order"):
        message = written()

    create, place = spans.get_finished_spans()
    assert create.parent == place.context
    assert create.context is not None
    assert f"{create.context.span_id:016x}" in message.headers["traceparent"]
    assert shown(create) == ("create orders", "PRODUCER", {
        "system": "outbox", "operation.name": "create", "operation.type": "create", "destination.name": "orders",
        "batch.message_count": 1,
    })  # fmt: skip


def test_a_lone_message_is_handled_with_its_baggage(spans):
    def handle(_: Message) -> None:
        seen.append(baggage.get_baggage("tenant"))

    seen: list[object] = []
    token = attach(baggage.set_baggage("tenant", "a"))
    message = written()
    detach(token)

    processed(handle, "billing", awaited=False)(message)

    assert seen == ["a"]


def test_a_call_that_sends_is_a_span_with_links_to_the_messages(spans):
    messages = [written(), written(), Message("orders", b"without")]
    created = spans.get_finished_spans()

    verdicts = [DONE, Retry("no"), DONE]
    call: dict[str, Any] = {"messages": messages, "verdicts": verdicts, "error": None, "seconds": 2.0}
    span = told(spans, events.HandedOver(**WHERE, destination="nats://n/s", **call))

    assert linked(span, created)
    assert span.end_time is not None and span.start_time is not None
    assert span.end_time - span.start_time == 2_000_000_000
    assert (span.status.status_code.name, span.status.description) == ("ERROR", "no")
    assert shown(span) == ("send nats://n/s", "PRODUCER", {
        "system": "nats", "operation.name": "send", "destination.subscription.name": "relay", "batch.message_count": 3,
    })  # fmt: skip


def test_a_settle_is_a_span_and_a_call_of_a_function_is_none_of_the_listeners(spans):
    message = written()
    call: dict[str, Any] = {"messages": [message], "verdicts": [DONE], "error": None, "seconds": 1.0}

    span = told(spans, events.Settled(**WHERE, partition=0, messages=[message], seconds=1.0))
    assert told(spans, events.HandedOver(**WHERE, destination=None, **call)) == span

    assert (shown(span)[:2], span.status.status_code.name) == (("settle", "CLIENT"), "UNSET")


def test_the_function_of_a_consumer_runs_in_a_span_below_that_of_the_message(spans):
    message, inner = written(), []

    processed(lambda _message: inner.append(trace.get_current_span()), "billing", awaited=False)(message)

    create, span = spans.get_finished_spans()
    assert (span.parent, linked(span, [create])) == (
        create.context,
        True,
    ) or span.parent.span_id == create.context.span_id
    assert [each.get_span_context() for each in inner] == [span.context]
    assert shown(span)[:2] == ("process orders", "CONSUMER")


def test_an_awaited_function_with_a_list_that_fails(spans):
    async def fail(_session: object, _messages: list[Message]) -> None:
        raise KeyError("odd")

    messages = [written(), written()]
    with pytest.raises(KeyError):
        asyncio.run(processed(fail, "billing", awaited=True)(None, messages))

    *created, span = spans.get_finished_spans()
    assert (span.parent, linked(span, created), span.status.status_code.name) == (None, True, "ERROR")


def test_metrics_have_their_names_units_and_attributes():
    reader = InMemoryMetricReader()
    exporter = OpenTelemetryExporter(MeterProvider([reader]).get_meter("outbox"))
    metrics = Metrics(exporter)
    message = Message("orders", b"1")

    metrics.told(events.HandedOver(**WHERE, destination="nats://n/s", messages=[message], verdicts=[DONE], error=None,
                                   seconds=0.5))  # fmt: skip
    metrics.told(events.LeaseTaken(**WHERE, partition=1, epoch=1))
    exporter.observe([DEAD, UNSENT], lambda: [Sample(DEAD, 3, ("shop", "relay"))])

    data = reader.get_metrics_data()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    found: dict[str, tuple[str, Any]] = {
        each.name: (str(each.unit), each.data.data_points[0]) for each in scope.metrics
    }
    where = {"database": "never-opened", "subscription": "relay"}
    of_call = {"messaging.system": "nats", "messaging.operation.name": "send", **where}
    assert {name: (unit, dict(point.attributes or {})) for name, (unit, point) in found.items()} == {
        "messaging.client.sent.messages": ("{message}", of_call),
        "messaging.client.operation.duration": ("s", of_call),
        "outbox.destination.up": ("1", {**where, "destination": "nats://n/s"}),
        "outbox.lease.takeovers": ("{lease}", where),
        "outbox.lease.held": ("1", {**where, "partition": "1"}),
        "outbox.dead": ("{message}", {"database": "shop", "subscription": "relay"}),
    }
    assert found["messaging.client.operation.duration"][1].sum == 0.5
