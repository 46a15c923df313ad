"""The Spark pipeline: messages as DataFrames, an archive of Parquet files that an extract writes, and reports.

Needs the extra: pip install 'outbox-log[spark]'.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from pyspark.sql import DataFrame, SparkSession

    from outbox.spark.jdbc import jdbc_predicates
    from outbox.spark.manifest import Manifest

__all__ = ["archived", "extract", "jdbc_predicates", "position", "register"]

_OF_DATABASE = ("url", "url_env", "service")
_OF_STANDBY = ("standby_url", "standby_url_env", "standby_service")


def register(spark: SparkSession) -> None:
    """Make `format("outbox")` known to a session that did not find it by itself. Works on Spark Connect, too.

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
        # Spark 4.0 refuses a name that it has found by itself.
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def position(
    *, url: str | None = None, url_env: str | None = None, service: str | None = None, schema: str | None = None
) -> str:
    """Capture the position of now, as text for the options `since`, `until` and `startingPosition`.

    Args:
        url: the primary's URL, without a password. Exactly one of `url`, `url_env` and `service` is needed.
        url_env: the name of an environment variable that holds the URL.
        service: the name of a service of libpq.
        schema: the schema of the tables, on PostgreSQL.
    """
    from contextlib import closing

    from outbox.spark.offset import write
    from outbox.spark.place import Address, Place
    from outbox.spark.planner import Planner

    place = Place(rows=Address(url=url, env=url_env, service=service, names=_OF_DATABASE), schema=schema)
    with closing(Planner(place)) as planner:
        return write(planner.now())


def extract(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    url: str | None = None,
    url_env: str | None = None,
    service: str | None = None,
    schema: str | None = None,
    standby_url: str | None = None,
    standby_url_env: str | None = None,
    standby_service: str | None = None,
    topics: Iterable[str] | None = None,
    halves: bool = False,
    register: str | None = None,
    hold: timedelta = timedelta(days=30),
    delta: bool = False,
    accept_gap: bool = False,
    accept_server: bool = False,
    rows_per_task: int = 500_000,
) -> Manifest | None:
    """Extract everything that was committed since the archive's last window, as one more window of Parquet files.

    The executors write the files; the manifest that makes them count is written last. A killed extract leaves the
    archive as it was. The next extract begins where the last manifest ends, so no message is missing and none is there
    twice.

    Args:
        spark: a session, also one of Spark Connect.
        path: the folder of the archive, on a disk that the driver and all executors see under this path.
        url: the database's URL, without a password. Exactly one of `url`, `url_env` and `service` is needed.
        url_env: the name of an environment variable that holds the URL, on the driver and on every executor.
        service: the name of a service of libpq.
        schema: the schema of the tables, on PostgreSQL.
        standby_url: the URL of a standby of that database, without a password. Executors read messages from it and not
            from the primary. Each waits until the standby has replayed everything up to the end of the window.
        standby_url_env: instead, the name of an environment variable that holds the URL of the standby.
        standby_service: instead, the name of a service of libpq for the standby.
        topics: extract only these; None: all. They must be the same at every extract to one archive.
        halves: also extract half messages of transactions.
        register: a name under which retention waits for this archive, at most `hold` after its last window.
        hold: how long retention waits after the last window.
        delta: also commit the files to a Delta table at `path`. Needs the extra `delta`.
        accept_gap: go on although messages were purged before they were extracted; the manifest notes it.
        accept_server: go on although another server, or another timeline, has the database now.
        rows_per_task: the most rows that one task writes.

    Returns:
        The manifest of the window; None if nothing was committed since the last one and nothing was written.

    Raises:
        ArchiveError: the archive cannot be read or written, or another extract has committed the same window.
        PurgedError: messages were purged before they were extracted.
        PositionError: the archive is of another server, or the server has lost messages that the archive has.
        DatabaseError: the database cannot be reached, or refuses.
        MissingExtraError: a package is not installed.
    """
    from contextlib import closing

    from outbox.model.topics import exact_topics
    from outbox.spark.continuation import Extraction
    from outbox.spark.job import Extract
    from outbox.spark.manifest import Archive
    from outbox.spark.place import Address, Place
    from outbox.spark.registration import Registration

    database = Address(url=url, env=url_env, service=service, names=_OF_DATABASE)
    place = Place(rows=database, schema=schema)
    if (standby_url, standby_url_env, standby_service) != (None, None, None):
        standby = Address(url=standby_url, env=standby_url_env, service=standby_service, names=_OF_STANDBY)
        place = Place(rows=standby, planner=database, schema=schema)
    wanted = Extraction(
        topics=exact_topics(topics),
        halves=halves,
        register=None if register is None else Registration(register, hold),
        delta=delta,
        accept_gap=accept_gap,
        accept_server=accept_server,
        rows_per_task=rows_per_task,
    )
    with closing(Extract(spark, Archive(path), place, wanted)) as job:
        return job.step()


def archived(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    topics: Iterable[str] | None = None,
    days: tuple[str, str] | None = None,
) -> DataFrame:
    """Return an archive's messages, with all columns of `messages`, from exactly the files that its manifests count.

    Args:
        spark: a session, also one of Spark Connect.
        path: the folder of the archive.
        topics: only messages of these topics; None: all. Files of other topics are not read.
        days: the first and the last day of `created_at`, in UTC, as `("2026-01-01", "2026-01-31")`; None: all.

    Raises:
        ArchiveError: there is no archive, it cannot be read, or a file of it is missing or has another size than its
            manifest says. With `days` only windows are read that may hold messages of these.
        OptionError: `days` are no days.
    """
    from outbox.spark import frames

    return frames.archived(spark, path, topics=topics, days=days)


def __getattr__(name: str) -> Any:
    """Import `jdbc_predicates` when it is asked for.

    An import at the top would be slow, because Spark imports this package in every session that uses any Python source.
    """
    if name != "jdbc_predicates":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outbox.spark.jdbc import jdbc_predicates

    return jdbc_predicates
