"""OpenTelemetry: the metrics and the spans of a process, by its API. Without an SDK they go nowhere.

A span `create` is made where a message is written, and its context travels in the headers of the message. `send` and
`settle` are made of events, after a call; `process` is around the function that handles a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from outbox.errors import MissingExtraError
from outbox.model.message import Message
from outbox.model.verdict import Done
from outbox.telemetry.events import EVERYWHERE, Event, HandedOver, Settled
from outbox.telemetry.metrics import BUCKETS, OF_STATE, Metric, Metrics, Sample

try:
    from opentelemetry.context import attach, detach, get_current
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
    from opentelemetry.propagate import extract
    from opentelemetry.trace import Link, SpanKind, StatusCode, Tracer, get_current_span, get_tracer
except ImportError as error:
    raise MissingExtraError("metrics and traces need an extra: pip install 'outbox-log[metrics]'") from error

#: A span has links to at most so many messages; the SDK keeps no more by default.
_MOST_LINKS = 128


class OpenTelemetryExporter:
    """Makes the metrics: `EVERYWHERE.listen(Metrics(OpenTelemetryExporter()).told)`."""

    def __init__(self, meter: Meter | None = None) -> None:
        """`meter`: None: one of the global provider."""
        self._meter = get_meter("outbox") if meter is None else meter

    def instrument(self, metric: Metric) -> Callable[..., object]:
        """Do as `Exporter.instrument`."""
        about: dict[str, Any] = {"name": metric.name, "unit": metric.unit, "description": metric.about}
        put: Callable[..., object]
        if metric.kind == "counter":
            put = self._meter.create_counter(**about).add
        elif metric.kind == "gauge":
            return self._gauge(metric)
        else:
            put = self._meter.create_histogram(**about, explicit_bucket_boundaries_advisory=BUCKETS).record
        names = metric.labels
        # A label without a text is no attribute.
        return lambda value, *given: put(value, {name: text for name, text in zip(names, given, strict=True) if text})

    def _gauge(self, metric: Metric) -> Callable[..., object]:
        """Return a function that sets a gauge: an observable gauge, because no other kind can end."""
        values: dict[tuple[str, ...], float] = {}

        def put(value: float | None, *labels: str) -> None:
            if value is None:
                values.pop(labels, None)
            else:
                values[labels] = value

        self.observe([metric], lambda: [Sample(metric, value, labels) for labels, value in list(values.items())])
        return put

    def observe(self, metrics: Sequence[Metric], samples: Callable[[], Iterable[Sample]]) -> None:
        """Do as `Exporter.observe`."""
        for metric in metrics:
            about: dict[str, Any] = {"name": metric.name, "unit": metric.unit, "description": metric.about}
            self._meter.create_observable_gauge(**about, callbacks=[partial(_observed, metric, samples)])


def _observed(
    metric: Metric, samples: Callable[[], Iterable[Sample]], _options: CallbackOptions
) -> Iterable[Observation]:
    for each in samples():
        if each.metric == metric:
            yield Observation(each.value, dict(zip(metric.labels, each.labels, strict=True)))


class Traces:
    """Makes spans of calls and settles: `EVERYWHERE.listen(Traces().told)`."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        """`tracer`: None: one of the global provider."""
        self._tracer = get_tracer("outbox") if tracer is None else tracer

    def told(self, event: Event) -> None:
        """Make a span of a call that has come back, or of a settle."""
        if isinstance(event, HandedOver) and event.destination is not None:
            self._send(event, event.destination)
        elif isinstance(event, Settled):
            self._span("settle", "outbox", event, SpanKind.CLIENT)

    def _send(self, event: HandedOver, destination: str) -> None:
        failed = next((each.error for each in event.verdicts or () if not isinstance(each, Done)), event.error)
        self._span(f"send {destination}", destination.partition(":")[0], event, SpanKind.PRODUCER, failed)

    def _span(
        self, name: str, system: str, event: HandedOver | Settled, kind: SpanKind, failed: str | None = None
    ) -> None:
        """Make a span that ends now, with links to the spans in which its messages were created."""
        end = time.time_ns()
        attributes: dict[str, str | int] = {
            "messaging.system": system,
            "messaging.operation.name": name.partition(" ")[0],
            "messaging.destination.subscription.name": event.subscription,
            "messaging.batch.message_count": len(event.messages),
        }
        begin = end - round(event.seconds * 1_000_000_000)
        span = self._tracer.start_span(name, kind=kind, attributes=attributes, start_time=begin)
        if span.is_recording():
            for link in _links(event.messages):
                span.add_link(link.context)
            if failed is not None:
                span.set_status(StatusCode.ERROR, failed)
        span.end(end)


@contextmanager
def processing(consumer: str, messages: Sequence[Message]) -> Iterator[None]:
    """Run the block in a span `process`: a child of the current span, else of the span that created a lone message.

    In the second case the message's baggage is that of the block.
    """
    about = messages[0].topic if messages else consumer
    alone = len(messages) == 1 and not get_current_span().get_span_context().is_valid
    attributes: dict[str, str | int] = {
        "messaging.system": "outbox",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": about,
        "messaging.consumer.group.name": consumer,
        "messaging.batch.message_count": len(messages),
    }
    token = attach(extract(dict(messages[0].headers)) if alone else get_current())
    try:
        with get_tracer("outbox").start_as_current_span(
            f"process {about}", kind=SpanKind.CONSUMER, links=list(_links(messages)), attributes=attributes
        ):
            yield
    finally:
        detach(token)


def export(samples: Callable[[], Iterable[Sample]] | None = None) -> None:
    """Send metrics and spans of this process to OpenTelemetry's global providers; a second call sends nothing twice.

    `samples`: returns the values of gauges of databases; see `Looks`.
    """
    exporter = _exporter()
    if samples is not None:
        exporter.observe(OF_STATE, samples)


@cache
def _exporter() -> OpenTelemetryExporter:
    exporter = OpenTelemetryExporter()
    EVERYWHERE.listen(Metrics(exporter).told)
    EVERYWHERE.listen(Traces().told)
    return exporter


def _links(messages: Sequence[Message]) -> Iterator[Link]:
    """Yield links to the spans in which the first messages were created."""
    for message in messages[:_MOST_LINKS]:
        context = get_current_span(extract(dict(message.headers))).get_span_context()
        if context.is_valid:
            yield Link(context)
