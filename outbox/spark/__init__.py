"""The Spark pipeline: messages as DataFrames, and the jobs that are worth having over them.

Needs the extra: pip install 'outbox-log[spark]'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from outbox.spark.jdbc import jdbc_predicates

__all__ = ["jdbc_predicates", "position", "register"]


def register(spark: SparkSession) -> None:
    """Make `format("outbox")` known to a session that did not find it by itself. Works on Spark Connect, too.

    Raises:
        MissingExtraError: pyspark or pyarrow is not installed.
    """
    from outbox.spark.tables import arrow_schema

    try:
        from outbox.spark.source import OutboxDataSource
    except ImportError as error:
        from outbox.errors import MissingExtraError

        raise MissingExtraError("Spark needs an extra: pip install 'outbox-log[spark]'") from error
    arrow_schema("meta", ())
    try:
        spark.dataSource.register(OutboxDataSource)
    except Exception as error:
        # Spark 4.0 refuses a name that it has found by itself, which is the same source.
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise


def position(
    *, url: str | None = None, url_env: str | None = None, service: str | None = None, schema: str | None = None
) -> str:
    """Capture the position of now, for `since`, `until` and `startingPosition`; say where by one of the first three.

    Args:
        url: of the primary, without a password.
        url_env: the environment variable that holds the URL.
        service: a service of libpq.
        schema: of the tables.
    """
    from contextlib import closing

    from outbox.spark.offset import write
    from outbox.spark.place import Address, Place
    from outbox.spark.planner import Planner

    place = Place(rows=Address(url=url, env=url_env, service=service), schema=schema)
    with closing(Planner(place)) as planner:
        return write(planner.now())


def __getattr__(name: str) -> Any:
    """Load what is asked for: Spark imports this package in every session that uses any Python source."""
    if name != "jdbc_predicates":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outbox.spark.jdbc import jdbc_predicates

    return jdbc_predicates
