"""Prometheus: the metrics of a process, by its client library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outbox.errors import MissingExtraError
from outbox.telemetry.metrics import BUCKETS, Metric

try:
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        REGISTRY,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        generate_latest,
    )
except ImportError as error:
    raise MissingExtraError("metrics need an extra: pip install 'outbox-log[metrics]'") from error


#: The content type of `exposed`.
CONTENT_TYPE = CONTENT_TYPE_LATEST


class PrometheusExporter:
    """Registers the metrics: `EVERYWHERE.listen(Metrics(PrometheusExporter(REGISTRY)).told)`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: for the metrics; None: a new one."""
        self._registry = CollectorRegistry() if registry is None else registry

    def exposed(self) -> bytes:
        """Return the metrics as text, after all others that the process has registered."""
        own = generate_latest(self._registry)
        return own if self._registry is REGISTRY else generate_latest(REGISTRY) + own

    def instrument(self, metric: Metric) -> Callable[..., object]:
        """Do as `Exporter.instrument`."""
        of_all: dict[str, Any] = {
            "name": metric.prometheus_name,
            "documentation": metric.about,
            "labelnames": [label.replace(".", "_") for label in metric.labels],
            "registry": self._registry,
        }
        if metric.kind == "counter":
            counter = Counter(**of_all)
            return lambda value, *labels: counter.labels(*labels).inc(value)
        if metric.kind == "gauge":
            gauge = Gauge(**of_all)
            return lambda value, *labels: gauge.labels(*labels).set(value)
        histogram = Histogram(**of_all, buckets=BUCKETS)
        return lambda value, *labels: histogram.labels(*labels).observe(value)
