"""Prometheus: the metrics of a process, by its client library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outbox.errors import MissingExtraError
from outbox.telemetry.metrics import BUCKETS, Metric, Sample

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
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError("metrics need an extra: pip install 'outbox-log[metrics]'") from error


_KINDS: Mapping[str, tuple[type[Any], str]] = {
    "counter": (Counter, "inc"), "gauge": (Gauge, "set"), "histogram": (Histogram, "observe")
}  # fmt: skip
#: The content type of `exposed`.
CONTENT_TYPE = CONTENT_TYPE_LATEST


class PrometheusExporter:
    """Registers the metrics: `EVERYWHERE.listen(Metrics(PrometheusExporter(REGISTRY)).told)`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry`: for the metrics; None: a new one."""
        self._registry = CollectorRegistry() if registry is None else registry

    def observe(self, metrics: Sequence[Metric], samples: Callable[[], Iterable[Sample]]) -> None:
        """Do as `Exporter.observe`."""
        self._registry.register(_Gauges(metrics, samples))

    def exposed(self) -> bytes:
        """Return the metrics as text, after all others that the process has registered."""
        own = generate_latest(self._registry)
        return own if self._registry is REGISTRY else generate_latest(REGISTRY) + own

    def instrument(self, metric: Metric) -> Callable[..., object]:
        """Do as `Exporter.instrument`."""
        of_all: dict[str, Any] = {
            "name": metric.prometheus_name,
            "documentation": metric.about,
            "labelnames": _names(metric),
            "registry": self._registry,
        }
        if metric.kind == "histogram":
            of_all["buckets"] = BUCKETS
        kind, verb = _KINDS[metric.kind]
        made = kind(**of_all)
        # By labels, because the client library takes longer to find them than to count.
        known: dict[tuple[str, ...], Callable[[float], object]] = {}

        def put(value: float, *labels: str) -> None:
            if labels not in known:
                known[labels] = getattr(made.labels(*labels), verb)
            known[labels](value)

        return put


class _Gauges(Collector):
    """Yields gauges whose values are asked for at each scrape."""

    def __init__(self, metrics: Sequence[Metric], samples: Callable[[], Iterable[Sample]]) -> None:
        self._metrics = metrics
        self._samples = samples

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the gauges without values, when they are registered."""
        return self._families().values()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the gauges."""
        families = self._families()
        for metric, value, labels in self._samples():
            families[metric].add_metric(labels, value)
        return families.values()

    def _families(self) -> dict[Metric, GaugeMetricFamily]:
        return {
            each: GaugeMetricFamily(each.prometheus_name, each.about, labels=_names(each)) for each in self._metrics
        }


def _names(metric: Metric) -> list[str]:
    return [label.replace(".", "_") for label in metric.labels]
