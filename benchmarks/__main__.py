"""`python -m benchmarks [names…] [--quick] [--out FOLDER] [--page]`: measure, and say which goals are kept."""

from __future__ import annotations

import argparse
import inspect
import logging
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
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
from benchmarks.fronts import front_vs_broker
from benchmarks.halves import check_pass, half_pending_relay, half_vs_send
from benchmarks.imports import importing
from benchmarks.keep import keep_vs_drain
from benchmarks.latency import embedded_latency, latency, latency_random
from benchmarks.machine import machine
from benchmarks.measure import FULL, QUICK, Measurement, say
from benchmarks.partitions import drain_8_calls, scale_4_processes
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
    ("drain_8_calls",): drain_8_calls,
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
    ("front_send_vs_broker", "front_transactions_vs_broker", "front_push_latency_p50"): front_vs_broker,
    ("spark_noop_vs_jdbc",): spark_noop_vs_jdbc,
    ("spark_extract_vs_jdbc", "spark_extract_vs_arrow", "spark_worker_memory"): spark_extract,
}
NAMES = tuple(name for names in BENCHMARKS for name in names)
_PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for, in a server of our own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ratios, each taken within this run.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}; all, if none is given")
    parser.add_argument("--quick", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="where the files go")
    parser.add_argument("--page", action="store_true", help="renew the table and the picture of docs/benchmarks.md")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    if options.page and options.quick:
        parser.error("--page needs figures that mean something; leave --quick out")
    run = report.Run(on=datetime.now(UTC).date(), machine=machine(), what=what_is_compared())

    def keep() -> None:
        report.save(run, options.out)
        if options.page:
            report.renew(_PAGE, run)

    print(report.HEADINGS, flush=True)
    try:
        failed = _measure(run, options.names or NAMES, quick=options.quick, keep=keep)
    finally:
        if run.measured:
            report.draw(run, options.out / "results.png")
            if options.page:
                shutil.copy(options.out / "results.png", _PAGE.parent / report.PICTURE)
    if failed:
        sys.exit(f"failed, and not measured: {', '.join(failed)}")


def what_is_compared() -> dict[str, str]:
    """The first line about each benchmark, by the names of what it measures."""
    lines = ((names, inspect.getdoc(getattr(each, "func", each)) or "") for names, each in BENCHMARKS.items())
    return {name: text.partition("\n")[0] for names, text in lines for name in names}


def _measure(run: report.Run, wanted: Sequence[str], *, quick: bool, keep: Callable[[], None]) -> list[str]:
    """Measure one benchmark after the other, and keep each when it is there; return the names of those that failed."""
    failed: list[str] = []
    began = time.monotonic()
    with PostgresServer(durable=True) as server:
        site = Site(server, QUICK if quick else FULL)
        for names, benchmark in BENCHMARKS.items():
            if not set(names) & set(wanted):
                continue
            started = time.monotonic()
            try:
                found = {each.name: each for each in benchmark(site) if each.name in wanted}
            except Exception:
                # A server that does not start takes its own rows away, and no others.
                traceback.print_exc()
                failed += [name for name in names if name in wanted]
                continue
            run.measured.update(found)
            keep()
            for each in found.values():
                print(report.line(each), flush=True)
            took, so_far = time.monotonic() - started, (time.monotonic() - began) / 60
            say(f"{' and '.join(names)}: {took:.0f} s; {so_far:.1f} minutes so far")
    return failed


if __name__ == "__main__":
    # A run that is told to stop ends as an interrupted one: its servers end, and the rows that it has are kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("outbox").setLevel(logging.ERROR)
    main()
