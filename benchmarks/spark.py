"""Reading the log with Spark: against Spark's own JDBC reader, and against the same work without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import DataFrame, SparkSession

from benchmarks.measure import Measurement, Turns, at_least, at_most
from benchmarks.site import PROCESSES, Place, Site
from outbox.spark import extract

_DRIVER = "org.postgresql:postgresql:42.7.7"
#: Tasks of an extract, and connections without Spark: as many as there are cores.
_TASKS = 2
#: Tried before, of which the quickest counts.
_PARTITIONS = (1, 2, 4)
_FETCH_SIZE = 10_000
_MOST_MEGABYTES = 300


def spark_noop_vs_jdbc(site: Site) -> list[Measurement]:
    """Thousands of rows a second into a sink that drops them: one partition of each reader."""
    turns = Turns("spark_noop_vs_jdbc")
    with _filled(site) as (place, count), _session() as spark:
        for reader in (_by_outbox, _by_jdbc):
            _drop(reader(spark, place, count, 1))
        for _ in range(site.scale.rounds):
            ours, other = (
                _thousands(count, lambda: _drop(reader(spark, place, count, 1)))  # noqa: B023 - called at once
                for reader in (_by_outbox, _by_jdbc)
            )
            turns.add(ours, other)
    return [_of(turns, 1.4)]


def spark_extract(site: Site) -> list[Measurement]:
    """Into Parquet: krow/s of an extract, JDBC at its best, Arrow without Spark; and a worker's MB against a limit."""
    jdbc, arrow = Turns("spark_extract_vs_jdbc"), Turns("spark_extract_vs_arrow")
    peaks: list[float] = []
    with _filled(site) as (place, count), _session() as spark, _folder() as folder, _pool() as pool:
        extracts = (folder / str(number) for number in range(1_000))

        def ours() -> None:
            extract(spark, next(extracts), url=place.url, rows_per_task=-(-count // _TASKS))

        def by_jdbc(partitions: int) -> None:
            _by_jdbc(spark, place, count, partitions).write.mode("overwrite").parquet(str(folder / "jdbc"))

        def without_spark() -> None:
            width = -(-count // _TASKS)
            spans = [(place.url, first, first + width, str(folder)) for first in range(1, count + 1, width)]
            pool.starmap(_write_by_arrow, spans)

        ours()
        without_spark()
        seconds = {number: _seconds(lambda: by_jdbc(number)) for number in _PARTITIONS}  # noqa: B023 - called at once
        best = min(seconds, key=lambda number: seconds[number])
        for _ in range(site.scale.rounds):
            with _peak_of_workers() as peak:
                rate = _thousands(count, ours)
            peaks.append(peak[0])
            jdbc.add(rate, _thousands(count, lambda: by_jdbc(best)))
            arrow.add(rate, _thousands(count, without_spark))
    remark = f"JDBC with {best} of {', '.join(map(str, _PARTITIONS))} partitions"
    memory = [float(_MOST_MEGABYTES)] * len(peaks)
    return [
        _of(jdbc, 1.4, remark),
        _of(arrow, 0.5, f"{_TASKS} tasks, {_TASKS} connections"),
        Measurement(name="spark_worker_memory", goal=at_most(1.0), unit="MB", ours=peaks, other=memory),
    ]


def _of(turns: Turns, goal: float, remark: str = "") -> Measurement:
    return Measurement(
        name=turns.name, goal=at_least(goal), unit="krow/s", ours=turns.ours, other=turns.other, remark=remark
    )


@contextmanager
def _filled(site: Site) -> Iterator[tuple[Place, int]]:
    with site.place() as place:
        place.fill(site.scale.extracted)
        yield place, site.scale.extracted


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        yield Path(folder)


@contextmanager
def _session() -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with _folder() as folder:
        driver = _driver(folder)
        builder = SparkSession.builder.master(f"local[{_TASKS}]").appName("outbox benchmarks")
        settings = {
            "spark.driver.extraClassPath": str(driver),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "3g",
            "spark.local.dir": str(folder),
            "spark.log.level": "ERROR",
            "spark.sql.session.timeZone": "UTC",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        for name, value in settings.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        try:
            yield spark
        finally:
            spark.stop()


def _driver(folder: Path) -> Path:
    """PostgreSQL's JDBC driver, which Maven fetches at the first time."""
    group, name, version = _DRIVER.split(":")
    repository = Path.home() / ".m2" / "repository"
    driver = repository / group.replace(".", "/") / name / version / f"{name}-{version}.jar"
    if not driver.exists():
        command = ["mvn", "-q", "-B", "dependency:get", f"-Dartifact={_DRIVER}", f"-Dmaven.repo.local={repository}"]
        subprocess.run(command, check=True, cwd=folder)
    return driver


# Readers


def _by_outbox(spark: SparkSession, place: Place, _count: int, partitions: int) -> DataFrame:
    return spark.read.format("outbox").option("url", place.url).option("partitions", partitions).load()


def _by_jdbc(spark: SparkSession, place: Place, count: int, partitions: int) -> DataFrame:
    url = f"jdbc:postgresql://{place.engine.url.host}:{place.engine.url.port}/{place.engine.url.database}"
    options: dict[str, Any] = {
        "url": url, "user": place.engine.url.username, "dbtable": "outbox_message", "fetchsize": _FETCH_SIZE,
        "driver": "org.postgresql.Driver",
    }  # fmt: skip
    if partitions > 1:
        options |= {"partitionColumn": "id", "lowerBound": 1, "upperBound": count, "numPartitions": partitions}
    return spark.read.format("jdbc").options(**options).load()


def _drop(rows: DataFrame) -> None:
    rows.write.format("noop").mode("overwrite").save()


def _write_by_arrow(url: str, first: int, end: int, folder: str) -> None:
    """Read a range of ids by ADBC, and write it as one file, as an extract writes its own."""
    import pyarrow.parquet as pq
    from adbc_driver_postgresql import dbapi

    query = f"""
        SELECT id, xact_id, message_id::text, topic, key, slot, tags, headers, content_type, body, created_at,
               deliver_at, expires_at
        FROM outbox_message WHERE id >= {first} AND id < {end} ORDER BY id
    """
    with dbapi.connect(url.replace("+psycopg", "")) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        batches = cursor.fetch_record_batch()
        path = Path(folder) / f"arrow-{first}.parquet"
        with pq.ParquetWriter(path, batches.schema, compression="zstd", use_dictionary=["topic", "key"]) as writer:
            for batch in batches:
                writer.write_batch(batch)


@contextmanager
def _pool() -> Iterator[Any]:
    with PROCESSES.Pool(_TASKS) as pool:
        yield pool


# Measuring


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _thousands(count: int, work: Callable[[], None]) -> float:
    return count / _seconds(work) / 1_000


@contextmanager
def _peak_of_workers() -> Iterator[list[float]]:
    """Megabytes that the largest of Spark's Python workers had of its own, looked at all the time."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if "pyspark.daemon" in " ".join(process.cmdline()):
                        peak[0] = max(peak[0], process.memory_full_info().pss / 1e6)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
