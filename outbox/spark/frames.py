"""An archive as a DataFrame: the files that its manifests count, and no others."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.errors import OptionError
from outbox.model.topics import require_names
from outbox.spark.manifest import Archive, ArchivedFile
from outbox.spark.tables import ddl
from outbox.store.log.extraction import MESSAGES, columns_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def archived(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    topics: Iterable[str] | None = None,
    days: tuple[str, str] | None = None,
) -> DataFrame:
    """Return an archive's messages, with all columns of `messages`, from exactly the files that its manifests count.

    Args:
        spark: a session, also of Spark Connect.
        path: the folder of the archive.
        topics: only messages of these topics; None: all. Files of other topics are not read.
        days: the first and the last day of `created_at`, in UTC, as `("2026-01-01", "2026-01-31")`; None: all. Files of
            other days are not read, and of the manifests of earlier windows only the newest.

    Raises:
        ArchiveError: there is no archive, the archive cannot be read, or a file is missing or has another size than its
            manifest says.
        OptionError: `days` are no days.
    """
    archive = Archive(path)
    archive.newest()
    wanted = None if topics is None else {topics} if isinstance(topics, str) else set(topics)
    require_names(wanted or ())
    files = archive.counted() if days is None else _of_days(archive, days)
    return of_files(spark, archive, [file for file in files if wanted is None or file.topic in wanted])


def of_files(spark: SparkSession, archive: Archive, files: Collection[ArchivedFile]) -> DataFrame:
    """Return the messages in some files of an archive."""
    schema = ddl(MESSAGES, tuple(columns_of(MESSAGES)))
    if not files:
        return spark.createDataFrame([], schema)
    archive.require(files)
    return spark.read.schema(schema).parquet(*(_literal(archive.path / file.path) for file in files))


def _of_days(archive: Archive, days: tuple[str, str]) -> list[ArchivedFile]:
    try:
        first, last = (date.fromisoformat(day).isoformat() for day in days)
    except ValueError as error:
        raise OptionError(f"days: {days} are no two days; write ('2026-01-01', '2026-01-31')") from error
    return [file for manifest in archive.of_days(first, last) for file in manifest.files if first <= file.day <= last]


def _literal(path: Path) -> str:
    """Escape a path, so that Spark does not expand a glob pattern in the name."""
    return re.sub(r"([][{}*?\\])", r"\\\1", str(path))
