"""`outbox extract`: writes messages to Parquet files, for analysis or to keep them."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import click

from outbox.cli.options import DURATION, NAMES, Target, about_a_database, as_json, as_value, from_a_standby, option
from outbox.cli.output import age, counted, say, show_json, tell
from outbox.cli.spark import Cluster, on_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from outbox.spark.job import Extract
    from outbox.spark.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The end of the command, and the pause between two windows."""

    until_empty: bool
    follow: bool
    interval: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The options for an `Extraction`."""

    topics: tuple[str, ...] | None
    halves: bool
    register: str | None
    hold: timedelta | None
    delta: bool
    accept_gap: bool
    accept_server: bool


@click.command()
@partial(about_a_database, unless="clean")
@click.argument("path")
@option("--until-empty", is_flag=True, help="Extract again and again, until no new message was committed.")
@option("--follow", is_flag=True, help="Go on until interrupted.")
@option("--interval", type=DURATION, default="10s", help="Pause of --follow without new messages.")
@as_value("pace", Pace)
@from_a_standby
@option("--topics", type=NAMES, help="Only messages of the named topics.")
@option("--halves", is_flag=True, help="Half messages of transactions, too.")
@option("--register", metavar="NAME", help="Let retention wait for the archive, under a name.")
@option("--hold", type=DURATION, help="With --register: how long after the last window at most. [default: 30d]")
@option("--delta", is_flag=True, help="Commit the files to a Delta table at PATH, too.")
@option("--accept-gap", is_flag=True, help="Go on although messages were purged before the extract.")
@option("--accept-server", is_flag=True, help="Go on although another server or timeline has the database now.")
@as_value("wanted", Wanted)
@option("--clean", type=DURATION, help="Extract nothing; delete older files that do not count: 1d.")
@on_spark
@as_json
def extract(
    *,
    target: Target | None,
    path: str,
    pace: Pace,
    standby: str | None,
    wanted: Wanted,
    clean: timedelta | None,
    cluster: Cluster,
    json: bool,
) -> None:
    """Extract messages to Parquet files in the folder PATH, by topic and day.

    Each run adds a window: the messages that were committed since the window before. The manifest,
    PATH/_outbox/NUMBER.json, is written last, and only files of manifests belong to the archive: after a kill no
    message is missing and no message is there twice. To read the archive: outbox.spark.archived(spark, PATH).

    Spark runs on this machine unless --master or --remote say otherwise. On a cluster every executor needs outbox-log
    with the extra, the folder under the same path, and, for a URL with a password, OUTBOX_DATABASE (with a standby:
    OUTBOX_STANDBY) in the environment.
    """
    if pace.until_empty and pace.follow:
        raise click.UsageError("--until-empty and --follow exclude each other")
    if wanted.hold is not None and wanted.register is None:
        raise click.UsageError("--hold says how long retention waits for --register NAME; give both")
    from outbox.cli.spark import place_of, require_extra, session
    from outbox.spark.manifest import Archive

    archive = Archive(path)
    if clean is not None:
        files, size = archive.clean(clean)
        told = f"{archive.path}: deleted {counted(files, 'file')} that no manifest counts, {_size(size)}"
        tell(told, {"deleted": files, "bytes": size}, json=json)
        return
    assert target is not None
    require_extra("pyspark", "pyarrow")
    if wanted.delta:
        require_extra("deltalake", extra="delta")
    from outbox.model.topics import exact_topics
    from outbox.spark.connections import rights_told
    from outbox.spark.job import Extract, Extraction

    given = {**asdict(wanted), "topics": exact_topics(wanted.topics), "hold": wanted.hold or timedelta(days=30)}
    asked = Extraction(**given)
    # Errors in the options, the database or the archive show before Spark is started, because that takes a while.
    with rights_told(), target.open_outbox():
        pass
    place = place_of(target, local=cluster.is_local, standby=standby)
    verbose = bool(click.get_current_context().params.get("verbose"))
    with closing(Extract(archive, place, asked)) as job:
        job.require_possible()
        with session(cluster=cluster, verbose=verbose) as spark:
            _run(job, spark, pace, json=json)


def _run(job: Extract, spark: SparkSession, pace: Pace, *, json: bool) -> None:
    from outbox.runtime.signals import stopping_on_signals

    stop = threading.Event()
    with stopping_on_signals(stop.set):
        worked = False
        while not stop.is_set():
            began = time.monotonic()
            try:
                manifest = job.step(spark)
            except Exception as error:
                if not (pace.follow and worked and _passes(error)):
                    raise
                stop.wait(pace.interval.total_seconds())
                continue
            worked = True
            _show(manifest, time.monotonic() - began, json=json, quiet=pace.follow)
            if not pace.follow and not (pace.until_empty and manifest is not None and manifest.rows):
                return
            if manifest is None or not manifest.rows:
                stop.wait(pace.interval.total_seconds())


def _passes(error: Exception) -> bool:
    """Report an error of the database and return True, because it may be back soon; return False for other errors."""
    from outbox.cli.failures import report_failure
    from outbox.errors import DatabaseError

    if not isinstance(error, DatabaseError):
        return False
    report_failure(error)
    return True


def _show(manifest: Manifest | None, seconds: float, *, json: bool, quiet: bool) -> None:
    if manifest is None:
        if not quiet and not json:
            say("nothing new")
        return
    if json:
        show_json(
            {
                "window": manifest.window,
                "rows": manifest.rows,
                "files": len(manifest.files),
                "bytes": manifest.bytes,
                "since": str(manifest.since),
                "until": str(manifest.until),
                "gap": None if manifest.gap is None else str(manifest.gap),
                "seconds": round(seconds, 3),
            }
        )
        return
    gap = "" if manifest.gap is None else f"; messages up to {manifest.gap} were purged before, and are missing"
    say(
        f"window {manifest.window}: {counted(manifest.rows, 'message')} in {counted(len(manifest.files), 'file')},"
        f" {_size(manifest.bytes)}, {age(seconds)}{gap}"
    )


def _size(number: int) -> str:
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
