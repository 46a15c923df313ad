"""Extracts without a JVM: a session that runs tasks where it is, and what tests read out of an archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from sqlalchemy import Engine, text

from outbox.spark import extract
from outbox.spark.job import Work, files_of, run
from outbox.spark.manifest import Archive, ArchivedFile, Manifest
from outbox.spark.tables import arrow_schema
from outbox.store.log.extraction import MESSAGES, columns_of


class Here(SparkSession):
    """In place of a session: tasks run in this process, one after the other."""

    def __init__(self) -> None:
        """There is no JVM."""


def run_here(spark: Any, work: Work) -> list[ArchivedFile]:
    """Run the tasks of a window, by Spark if that is what there is."""
    if not isinstance(spark, Here):
        return run(spark, work)
    return [file for number in range(len(work.tasks)) for file in files_of(work, number)]


def extracted(engine: Engine, path: Path, *, spark: Any = None, **options: Any) -> Manifest | None:
    """One window of an engine's messages."""
    url = engine.url.render_as_string(hide_password=False)
    return extract(spark or Here(), path, url=url, **options)


def table_of(path: Path) -> pa.Table:
    """Everything that the manifests of an archive count, window after window, in the order of ids."""
    schema = arrow_schema(MESSAGES, tuple(columns_of(MESSAGES)))
    tables = [schema.empty_table()]
    archive = Archive(path)
    for manifest in archive.manifests():
        of_window = [pq.ParquetFile(archive.path / file.path).read() for file in manifest.files]
        tables += [pa.concat_tables(of_window).sort_by("id")] if of_window else []
    return pa.concat_tables(tables)


def ids_of(path: Path) -> list[int]:
    """The ids in an archive, window after window."""
    found: list[int] = table_of(path).column("id").to_pylist()
    return found


def files_in(path: Path) -> list[Path]:
    """All Parquet files in a folder, counted or not."""
    return sorted(path.rglob("*.parquet"))


def ids_in(engine: Engine) -> list[int]:
    """The ids of the log."""
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT id FROM outbox_message ORDER BY id")).scalars())
