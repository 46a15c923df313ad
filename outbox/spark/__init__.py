"""The Spark pipeline: messages as DataFrames, an archive of Parquet files that an extract writes, and reports.

Needs the extra: pip install 'outbox-log[spark]'.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from outbox.spark.frames import archived
    from outbox.spark.job import extract
    from outbox.spark.planner import position

__all__ = ["archived", "extract", "position", "register"]

#: Loaded at the first use: Spark imports this package in every session that uses any Python source.
_HOMES = {"archived": "frames", "extract": "job", "position": "planner"}


def register(spark: SparkSession) -> None:
    """Make `format("outbox")` known to a session that did not find the source itself. Works on Spark Connect, too.

    Raises:
        MissingExtraError: pyspark or pyarrow is not installed.
    """
    from outbox.spark.tables import arrow_schema

    try:
        from pyspark.errors import AnalysisException

        from outbox.spark.source import OutboxDataSource
    except ImportError as error:
        from outbox.errors import MissingExtraError

        raise MissingExtraError("Spark needs an extra: pip install 'outbox-log[spark]'") from error
    arrow_schema("meta", ())
    try:
        spark.dataSource.register(OutboxDataSource)
    except AnalysisException as error:
        # Spark 4.0 refuses a name that Spark has found already.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
