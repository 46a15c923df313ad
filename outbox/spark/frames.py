"""An archive as a DataFrame: the files that its manifests count, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.model.topics import require_names
from outbox.spark.manifest import Archive
from outbox.spark.tables import ddl
from outbox.store.log.extraction import MESSAGES, columns_of

if TYPE_CHECKING:
    import os

    from pyspark.sql import DataFrame, SparkSession


def archived(
    spark: SparkSession, path: str | os.PathLike[str], *, topics: Iterable[str] | None, days: tuple[str, str] | None
) -> DataFrame:
    """Return the messages of an archive as it is now. Files of other topics and days are left out."""
    archive = Archive(path)
    archive.newest()
    schema = ddl(MESSAGES, tuple(columns_of(MESSAGES)))
    wanted = None if topics is None else {topics} if isinstance(topics, str) else set(topics)
    require_names(wanted or ())
    first, last = days or ("", "9999-12-31")
    files = [
        file for file in archive.counted() if (wanted is None or file.topic in wanted) and first <= file.day <= last
    ]
    if not files:
        return spark.createDataFrame([], schema)
    archive.require(files)
    return spark.read.schema(schema).parquet(*(_literal(archive.path / file.path) for file in files))


def _literal(path: Path) -> str:
    """Escape a path, so that Spark does not expand it as a glob pattern."""
    return re.sub(r"([][{}*?\\])", r"\\\1", str(path))
