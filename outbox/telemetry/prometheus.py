"""Prometheus: the metrics of a process, by its client library."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from outbox.errors import MissingExtraError
from outbox.telemetry.metrics import BUCKETS, UP, Metric, Sample

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
    from prometheus_client.core import Metric as PrometheusMetric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingExtraError("metrics need an extra: pip install 'outbox-log[metrics]'") from error


_KINDS: Mapping[str, tuple[type[Any], str]] = {
    "counter": (Counter, "inc"), "gauge": (Gauge, "set"), "histogram": (Histogram, "observe")
}  # fmt: skip
#: False where processes share metrics by files, as the client library decides at its import.
_ALONE = not {"PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"} & set(os.environ)
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
        return generate_latest(self._registry if self._registry is REGISTRY else _Together(REGISTRY, self._registry))

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
        if metric.kind == "gauge":
            # Of several processes with a common folder: 1 where one has the lease, 0 where one has an outage. Dead
            # processes are left out.
            of_all["multiprocess_mode"] = "livemin" if metric is UP else "livemax"
        kind, verb = _KINDS[metric.kind]
        made = kind(**of_all)
        # By labels, because the client library takes longer to find them than to count.
        known: dict[tuple[str, ...], Callable[[float], object]] = {}

        def put(value: float | None, *labels: str) -> None:
            if value is None:
                # The files of several processes keep the last value.
                if _ALONE and labels in known:
                    del known[labels]
                    made.remove(*labels)
                return
            if labels not in known:
                known[labels] = getattr(made.labels(*labels), verb)
            known[labels](value)

        return put


class _Together(CollectorRegistry):
    """Several registries as one page: the first registry with a metric shows the metric."""

    def __init__(self, *registries: CollectorRegistry) -> None:
        super().__init__()
        self._registries = registries

    def collect(self) -> Iterator[PrometheusMetric]:
        """Yield the metrics."""
        seen = set[str]()
        for registry in self._registries:
            found = list(registry.collect())
            yield from (each for each in found if each.name not in seen)
            seen.update(each.name for each in found)


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
