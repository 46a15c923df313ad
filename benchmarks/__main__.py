"""`python -m benchmarks [names…] [--quick] [--out FOLDER]`: measure, and say which goals are kept."""

from __future__ import annotations

import argparse
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.async_write import async_write, async_write_asyncpg
from benchmarks.beside import beside_black_hole, beside_dead_key, beside_outage, beside_unknown_topics
from benchmarks.business import business_1, business_5, write_4_connections
from benchmarks.consume import consume_8_vs_1, consume_inbox, consume_vs_relay, filter_pushdown, filter_pushdown_number
from benchmarks.consumers import latency_kafka, latency_nats
from benchmarks.dashboard import dashboard_drain, dashboard_pages
from benchmarks.destinations import kafka_vs_raw, nats_vs_raw, rabbitmq_vs_raw, redis_vs_raw, webhook_vs_raw
from benchmarks.drain import drain_pinned_vs_claim, drain_vs_claim, drain_vs_fetch
from benchmarks.flat import flat_backlog, flat_pinned
from benchmarks.flat_writer import flat_writer
from benchmarks.halves import check_pass, half_pending_relay, half_vs_send
from benchmarks.imports import importing
from benchmarks.keep import keep_vs_drain
from benchmarks.latency import embedded_latency, latency, latency_random
from benchmarks.measure import FULL, QUICK, Measurement, say
from benchmarks.partitions import drain_8_partitions, scale_4_processes
from benchmarks.receive import receive
from benchmarks.site import Site
from benchmarks.spark import spark_extract, spark_noop_vs_jdbc
from benchmarks.telemetry import metrics_cost, telemetry_drain, telemetry_write
from benchmarks.write import write, write_keyed, write_psycopg
from outbox.testing.servers import PostgresServer

#: By the names of what they measure.
BENCHMARKS: Mapping[tuple[str, ...], Callable[[Site], list[Measurement]]] = {
    ("import",): importing,
    ("write",): write,
    **{(f"write_keyed_{messages}",): partial(write_keyed, messages=messages) for messages in (1, 5)},
    **{(f"write_psycopg_{messages}",): partial(write_psycopg, messages=messages) for messages in (1, 5)},
    **{(f"write_4_connections_{messages}",): partial(write_4_connections, messages=messages) for messages in (1, 5)},
    ("async_write",): async_write,
    ("async_write_asyncpg",): async_write_asyncpg,
    ("telemetry_write",): telemetry_write,
    ("telemetry_drain",): telemetry_drain,
    ("metrics_cost",): metrics_cost,
    ("dashboard_pages",): dashboard_pages,
    ("dashboard_drain",): dashboard_drain,
    ("business_1",): business_1,
    ("business_5",): business_5,
    ("drain_vs_claim",): drain_vs_claim,
    ("drain_vs_fetch",): drain_vs_fetch,
    ("drain_pinned_vs_claim",): drain_pinned_vs_claim,
    ("drain_8_partitions",): drain_8_partitions,
    ("scale_4_processes",): scale_4_processes,
    ("consume_vs_relay",): consume_vs_relay,
    ("consume_8_vs_1",): consume_8_vs_1,
    ("consume_inbox",): consume_inbox,
    ("filter_pushdown",): filter_pushdown,
    ("filter_pushdown_number",): filter_pushdown_number,
    **{(f"receive_{callers}",): partial(receive, callers=callers) for callers in (1, 4, 8)},
    ("latency_p50", "latency_p99"): latency,
    **{
        (f"latency_random_{a_second}_p50", f"latency_random_{a_second}_p99"): partial(latency_random, a_second=a_second)
        for a_second in (50, 200, 600)
    },
    ("embedded_latency_p50",): embedded_latency,
    ("beside_black_hole",): beside_black_hole,
    ("beside_unknown_topics",): beside_unknown_topics,
    ("beside_dead_key",): beside_dead_key,
    ("beside_outage",): beside_outage,
    ("keep_vs_drain",): keep_vs_drain,
    ("flat_backlog",): flat_backlog,
    ("flat_pinned",): flat_pinned,
    ("flat_writer_drain", "flat_writer_latency"): flat_writer,
    ("half_vs_send",): half_vs_send,
    ("half_pending_relay",): half_pending_relay,
    ("check_pass",): check_pass,
    ("nats_vs_raw", "nats_vs_raw_50_keys", "nats_vs_raw_5_ms"): nats_vs_raw,
    ("kafka_vs_raw", "kafka_vs_raw_50_keys", "kafka_vs_raw_5_ms"): kafka_vs_raw,
    ("redis_vs_raw", "redis_vs_raw_50_keys", "redis_vs_raw_5_ms"): redis_vs_raw,
    ("rabbitmq_vs_raw",): rabbitmq_vs_raw,
    ("webhook_vs_raw",): webhook_vs_raw,
    ("latency_nats",): latency_nats,
    ("latency_kafka",): latency_kafka,
    ("spark_noop_vs_jdbc",): spark_noop_vs_jdbc,
    ("spark_extract_vs_jdbc", "spark_extract_vs_arrow", "spark_worker_memory"): spark_extract,
}
NAMES = tuple(name for names in BENCHMARKS for name in names)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for, in a server of our own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ratios, each taken within this run.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}; all, if none is given")
    parser.add_argument("--quick", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="where the files go")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    logging.getLogger("outbox").setLevel(logging.ERROR)
    measurements = _measure(options.names or NAMES, quick=options.quick)
    report.save(measurements, options.out, what_is_compared())
    print(report.table(measurements))


def what_is_compared() -> dict[str, str]:
    """The first line about each benchmark, by the names of what it measures."""
    lines = ((names, inspect.getdoc(getattr(each, "func", each)) or "") for names, each in BENCHMARKS.items())
    return {name: text.partition("\n")[0] for names, text in lines for name in names}


def _measure(wanted: Sequence[str], *, quick: bool) -> list[Measurement]:
    measurements: list[Measurement] = []
    with PostgresServer(durable=True) as server:
        site = Site(server, QUICK if quick else FULL)
        for names, benchmark in BENCHMARKS.items():
            if set(names) & set(wanted):
                started = time.monotonic()
                measurements += [each for each in benchmark(site) if each.name in wanted]
                say(f"{' and '.join(names)}: {time.monotonic() - started:.0f} s")
    return measurements


if __name__ == "__main__":
    main()
