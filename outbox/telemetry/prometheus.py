"""Prometheus: the metrics of a process, by its client library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outbox.errors import MissingExtraError
from outbox.telemetry.metrics import BUCKETS, Metric

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
except ImportError as error:
    raise MissingExtraError("metrics need an extra: pip install 'outbox-log[metrics]'") from error


class PrometheusExporter:
    """Registers the metrics: `EVERYWHERE.listen(Metrics(PrometheusExporter(REGISTRY)).told)`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

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
