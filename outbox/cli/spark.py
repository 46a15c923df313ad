"""Spark for commands: a quiet session on this machine, or a session on a cluster."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from outbox.cli.options import Target, as_value, option, together
from outbox.cli.secrets import no_password
from outbox.errors import MissingExtraError, OutboxError
from outbox.runtime.secret import secrets_of
from outbox.store.dialects.kinds import is_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from sqlalchemy import URL

    from outbox.spark.place import Address, Place

DATABASE_VARIABLE, STANDBY_VARIABLE = "OUTBOX_DATABASE", "OUTBOX_STANDBY"

#: The settings of a session on this machine. Only this command uses it, so it listens on this machine only.
_LOCAL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.log.level": "ERROR",
}
#: Beginnings of lines from Java that do not say why Spark did not start.
_NOISE = ("WARNING", "Using Spark", "Setting default", "\tat ", "  ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The place of Spark: a cluster, a server of Spark Connect, or this machine. `conf`: settings, as `name=value`."""

    master: str | None
    remote: str | None
    conf: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for each in self.conf:
            if not each.partition("=")[0].startswith("spark.") or "=" not in each:
                raise click.UsageError(f"--conf {each}: write spark.name=value, such as spark.executor.memory=4g")
        if self.master is not None and self.remote is not None:
            raise click.UsageError("--master and --remote exclude each other")

    @property
    def is_local(self) -> bool:
        """True if Spark runs on this machine."""
        return self.master is None and self.remote is None


#: Gives a command `--master`, `--remote` and `--conf`, as `cluster`.
on_spark = together(
    option(
        "--master",
        metavar="URL",
        show_default="Spark on this machine",
        help="A cluster: spark://host:7077, yarn, k8s://…, local[4].",
    ),
    option("--remote", metavar="URL", callback=no_password, help="A server of Spark Connect: sc://host:15002."),
    option("--conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark. May be given several times."),
    as_value("cluster", Cluster),
)


class SparkStartError(OutboxError):
    """Spark could not be started, or reached."""


def require_extra(*packages: str, extra: str = "spark") -> None:
    """Raise `MissingExtraError` if a package is missing, before Spark is started."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(f"{package} is not installed: pip install 'outbox-log[{extra}]'")


def require_drawable(picture: Path | None) -> None:
    """Raise if a picture could not be drawn, before the data is read: without matplotlib, say."""
    if picture is None:
        return
    require_extra("matplotlib", extra="plot")
    formats = import_module("matplotlib.backend_bases").FigureCanvasBase.filetypes
    form = picture.suffix.removeprefix(".").lower()
    # A file without a suffix becomes a PNG.
    if form and form not in formats:
        raise click.UsageError(f"--plot {picture}: no picture can be drawn as .{form}; name a FILE.png, .svg or .pdf")
    if picture.is_dir():
        raise click.UsageError(
            f"--plot {picture}: this is a folder; name a file there, such as {picture / 'report.png'}"
        )
    if not picture.absolute().parent.is_dir():
        raise click.UsageError(
            f"--plot {picture}: there is no folder {picture.parent}; make the folder, or name another file"
        )
    if not os.access(picture if picture.exists() else picture.absolute().parent, os.W_OK):
        raise click.UsageError(f"--plot {picture}: this user may not write there; name another file")


@contextmanager
def session(*, cluster: Cluster, verbose: bool = False) -> Iterator[SparkSession]:
    """Open a Spark session, and stop the session at the end; an active session is used, and stays open."""
    require_extra("pyspark", "pyarrow")
    from pyspark.sql import SparkSession

    there = None if cluster.remote is not None else SparkSession.getActiveSession()
    if there is not None:
        yield there
        return
    # Otherwise Spark takes the first python3 on the PATH, perhaps one without these packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    started = _started(cluster, verbose=verbose)
    try:
        yield started
    finally:
        # The JVM may be gone by now, and there is nothing left to stop.
        with suppress(Exception):
            started.stop()


def place_of(target: Target, *, local: bool, standby: str | None = None) -> Place:
    """Return the place of a command's database, in a form without a password for plans and logs.

    `standby`: the URL of a standby, to be read instead.
    """
    from outbox.cli.connection import url_of
    from outbox.spark.place import Place

    database = url_of(target.url)
    if standby is None:
        return Place(rows=_address(database, DATABASE_VARIABLE, local=local), schema=target.schema)
    copy = url_of(standby)
    if is_file(database) or is_file(copy):
        raise click.UsageError("--standby is for PostgreSQL; SQLite has no standbys")
    return Place(
        rows=_address(copy, STANDBY_VARIABLE, local=local),
        # This process alone connects to the database itself.
        planner=_address(database, DATABASE_VARIABLE, local=True),
        schema=target.schema,
    )


def _address(url: URL, variable: str, *, local: bool) -> Address:
    """Return the address of a database: the URL, or for a URL with a password the variable of the environment.

    The processes of a session on this machine inherit the environment; on a cluster the variable has to be set.
    """
    from outbox.spark.place import Address

    if is_file(url) and url.database:
        url = url.set(database=os.path.abspath(url.database))  # noqa: PTH100 - it is a text
    text = url.render_as_string(hide_password=False)
    if not secrets_of(text):
        return Address(text)
    if local:
        os.environ[variable] = text
    return Address(f"env:{variable}")


def source_options(target: Target, *, local: bool) -> dict[str, str]:
    """Return the options of the source for a command's database."""
    place = place_of(target, local=local)
    return {"url": place.rows.text, **({} if place.schema is None else {"schema": place.schema})}


def _started(cluster: Cluster, *, verbose: bool) -> SparkSession:
    from pyspark.sql import SparkSession

    master, remote = cluster.master, cluster.remote
    if remote is not None:
        if find_spec("grpc") is None:
            raise MissingExtraError("Spark Connect needs packages of its own: pip install 'pyspark[connect]'")
        with _explained(None, f"Spark Connect does not answer at {remote}", "is it running?"):
            return _configured(SparkSession.builder.remote(remote), cluster).getOrCreate()
    fix = "Spark needs Java 17 or newer (JAVA_HOME, or java on the PATH)"
    if master is not None:
        fix = f"is {master} there, and of the same version?"
    builder = SparkSession.builder.appName("outbox").master(master or "local[*]")
    if master is None:
        for name, value in _LOCAL.items():
            builder = builder.config(name, value)
    with (
        tempfile.TemporaryFile() as said,
        _explained(said, "Spark does not start", fix),
        _silenced(said if master is None and not verbose else None),
    ):
        return _configured(builder, cluster).getOrCreate()


def _configured(builder: SparkSession.Builder, cluster: Cluster) -> SparkSession.Builder:
    for each in cluster.conf:
        name, _, value = each.partition("=")
        builder = builder.config(name, value)
    return builder


@contextmanager
def _silenced(said: IO[bytes] | None) -> Iterator[None]:
    """Redirect the output of processes that start meanwhile: Java begins with warnings that do not matter here."""
    if said is None:
        yield
        return
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    try:
        for number, _ in kept:
            os.dup2(said.fileno(), number)
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


@contextmanager
def _explained(said: IO[bytes] | None, what: str, fix: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        lines: list[str] = []
        if said is not None:
            said.seek(0)
            lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if not line.startswith(_NOISE)]
        raised = str(error).strip().splitlines() or [type(error).__name__]
        # Py4J says on a line of its own what Java said.
        reason = [*telling, *(line[2:] for line in raised if line.startswith(": ")), raised[0]][0].strip()
        raise SparkStartError(f"{what}: {reason:.300}; {fix}") from error
