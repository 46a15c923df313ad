"""Spark for commands: a session, and the options by which it reads the database of the command."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.cli.options import Target, option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

F = TypeVar("F", bound=Callable[..., Any])

#: Read by the executors where the URL holds a password, which no option of Spark's may.
URL_VARIABLE = "OUTBOX_DATABASE"

_LOCAL = "local[*]"
#: What a command at a terminal wants; a cluster has its own settings, by `--conf` of Spark's own scripts.
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
_LOCAL_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where Spark runs: a master, or the URL of a Spark Connect server."""

    master: str | None
    remote: str | None


def on_spark(function: F) -> F:
    """Give a command `--master` and `--remote`, and hand them over as `cluster`."""

    @functools.wraps(function)
    def command(*args: Any, master: str | None, remote: str | None, **rest: Any) -> Any:
        return function(*args, cluster=Cluster(master, remote), **rest)

    for decorate in (
        option(
            "--remote", metavar="URL", envvar="OUTBOX_SPARK_REMOTE", help="A Spark Connect server: sc://host:15002."
        ),
        option(
            "--master",
            metavar="URL",
            envvar="OUTBOX_SPARK_MASTER",
            help=f"The cluster: spark://host:7077, yarn, …; otherwise {_LOCAL}.",
        ),
    ):
        command = decorate(command)
    return command  # type: ignore[return-value]


@contextmanager
def session(cluster: Cluster) -> Iterator[SparkSession]:
    """A session there. One that this process has already is used, and left as it is."""
    from outbox.errors import MissingExtraError

    try:
        import pyarrow  # noqa: F401 - executors need it
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise MissingExtraError("Spark needs an extra: pip install 'outbox-log[spark]'") from error
    from outbox.spark import register

    running = SparkSession.getActiveSession()
    spark = running or _started(cluster)
    try:
        register(spark)
        yield spark
    finally:
        if running is None:
            spark.stop()


def source_options(target: Target) -> dict[str, str]:
    """Return the options by which Spark's processes reach the database of a command, without any password."""
    from sqlalchemy import make_url

    schema = {} if target.schema is None else {"schema": target.schema}
    url = make_url(target.url)
    if url.password is None and not url.query:
        return {"url": target.url, **schema}
    # Inherited by the processes of a local Spark. Those of a cluster have to have it.
    os.environ[URL_VARIABLE] = target.url
    return {"urlEnv": URL_VARIABLE, **schema}


def _started(cluster: Cluster) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("outbox")
    settings = dict(_SETTINGS)
    if cluster.remote is not None:
        builder = builder.remote(cluster.remote)
    else:
        master = cluster.master or _LOCAL
        builder = builder.master(master)
        if master.startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            settings |= _LOCAL_SETTINGS
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
