"""The benchmarks run, and say what they found in the form that programs read."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.storm

ROOT = Path(__file__).parents[2]

GOALS = {
    "import": "<= 1.30",
    "write": "<= 1.10",
    "write_keyed_1": "<= 1.10",
    "write_keyed_5": "<= 1.15",
    "write_psycopg_1": "<= 1.10",
    "write_psycopg_5": "<= 1.15",
    "write_4_connections_1": "<= 1.15",
    "write_4_connections_5": "<= 1.15",
    "async_write": "<= 1.10",
    "async_write_asyncpg": "<= 1.10",
    "telemetry_write": "<= 1.01",
    "telemetry_drain": ">= 0.99",
    "metrics_cost": "<= 1.02",
    "dashboard_pages": "<= 1.00",
    "dashboard_drain": ">= 0.98",
    "business_1": ">= 0.90",
    "business_5": ">= 0.90",
    "drain_vs_claim": ">= 2.20",
    "drain_vs_fetch": ">= 0.90",
    "drain_pinned_vs_claim": ">= 3.00",
    "drain_8_calls": ">= 4.00",
    "scale_4_processes": ">= 3.50",
    "consume_vs_relay": ">= 0.50",
    "consume_8_vs_1": ">= 7.00",
    "consume_inbox": ">= 0.80",
    "filter_pushdown": ">= 10.00",
    "filter_pushdown_number": ">= 4.00",
    "receive_1": ">= 0.30",
    "receive_4": ">= 0.30",
    "receive_8": ">= 0.30",
    "latency_p50": "<= 1.50",
    "latency_p99": "<= 2.00",
    "latency_random_50_p50": "<= 1.50",
    "latency_random_50_p99": "<= 2.00",
    "latency_random_200_p50": "<= 1.50",
    "latency_random_200_p99": "<= 2.00",
    "latency_random_600_p50": "<= 1.50",
    "latency_random_600_p99": "<= 2.00",
    "embedded_latency_p50": "<= 1.00",
    "beside_black_hole": "<= 1.00",
    "beside_unknown_topics": "<= 1.00",
    "beside_dead_key": "<= 1.00",
    "beside_outage": "<= 1.00",
    "keep_vs_drain": ">= 0.80",
    "flat_backlog": ">= 0.90",
    "flat_pinned": ">= 0.90",
    "flat_writer_drain": ">= 0.90",
    "flat_writer_latency": ">= 0.90",
    "half_vs_send": ">= 0.40",
    "half_pending_relay": ">= 0.95",
    "check_pass": "<= 1.50",
    "nats_vs_raw": ">= 1.00",
    "nats_vs_raw_50_keys": ">= 1.00",
    "nats_vs_raw_5_ms": ">= 0.70",
    "kafka_vs_raw": ">= 0.85",
    "kafka_vs_raw_50_keys": ">= 0.85",
    "kafka_vs_raw_5_ms": ">= 0.70",
    "redis_vs_raw": ">= 0.85",
    "redis_vs_raw_50_keys": ">= 0.85",
    "redis_vs_raw_5_ms": ">= 0.70",
    "rabbitmq_vs_raw": ">= 0.80",
    "webhook_vs_raw": ">= 0.80",
    "latency_nats": "<= 5.00",
    "latency_kafka": "<= 5.00",
    "front_send_vs_broker": ">= 0.30",
    "front_transactions_vs_broker": ">= 0.30",
    "front_push_latency_p50": "<= 3.00",
    "spark_noop_vs_jdbc": ">= 1.40",
    "spark_extract_vs_jdbc": ">= 1.40",
    "spark_extract_vs_arrow": ">= 0.50",
    "spark_worker_memory": "<= 1.00",
}
#: These start a Spark or a broker of their own, which takes more of the processor than all others together.
_SLOW = re.compile("spark|kafka|nats|rabbitmq|redis|webhook|front")


@pytest.mark.alone
@pytest.mark.timeout(1850)
@pytest.mark.usefixtures("postgres")
def test_every_benchmark_runs_and_reports_its_ratio_and_its_goal(tmp_path: Path, full: bool) -> None:
    """At a size that says nothing about speed; those with slow servers run at full scale."""
    goals = {name: goal for name, goal in GOALS.items() if full or not _SLOW.search(name)}
    command = [sys.executable, "-m", "benchmarks", *goals, "--quick", "--out", str(tmp_path)]

    # What Java runs here ends before a good compiler has paid for itself.
    environment = os.environ | {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}

    run = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)

    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert {name: result["goal"] for name, result in found.items()} == goals
    assert {tuple(result) for result in found.values()} == {("value", "goal", "met", "rounds")}
    assert all(result["rounds"] == [result["value"]] for result in found.values() if len(result["rounds"]) == 1)
    page = (tmp_path / "results.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    measured = [name for name, row in rows.items() if "| not measured |" not in row]
    assert (list(rows), measured) == (list(GOALS), list(goals))
    assert all(cell.strip() for name in measured for cell in rows[name].split("|")[1:-1])
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert [line.split()[0] for line in run.stdout.splitlines()[1:]] == list(goals)
