"""The extract: Spark's executors write all messages committed since the last window to an archive.

Spark only hands out the tasks; no message passes through the JVM. A window is never divided into smaller ones. A cut by
transaction would deliver a key's messages out of order, and a cut by id is not a position. In memory a window needs
only its list of files; its size is limited by the disk. A window that is killed is extracted again as a whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from outbox import errors
from outbox.errors import ArchiveError, OutboxError, PositionError, PurgedError
from outbox.model.position import EARLIEST, Position, Window
from outbox.model.topics import exact_topics
from outbox.spark.files import TaskFiles
from outbox.spark.manifest import Archive, ArchivedFile, Manifest, sorted_files
from outbox.spark.place import Address, Place
from outbox.spark.planner import ROWS_PER_TASK, Planner
from outbox.spark.registration import Registration
from outbox.store.log.extraction import Narrowing
from outbox.store.log.stamp import Stamp

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from outbox.spark.fetch import Task

#: A window without rows is committed only this long after the window before it. So an idle archive has few manifests,
#: and its position, which retention waits for, stays recent.
EMPTY_AFTER = timedelta(minutes=5)
_FILES = (
    "array<struct<path string, topic string, day string, rows bigint, bytes bigint, sha256 string, first_id bigint,"
    " last_id bigint>>"
)
#: An error of this library, as printed in the traceback of an executor.
_OURS = re.compile(r"^outbox\.errors\.(\w+): (.+)$", re.MULTILINE)
#: Errors that cannot be made from one text.
_WITH_PARTS = {"InvalidMessageError", "VerdictStandsError"}
#: The beginnings of lines that report a disk error of an executor.
_OS_ERRORS = ("OSError", "PermissionError", "FileNotFoundError", "FileExistsError", "NotADirectoryError")
_OF_THE_DISK = "see that there is room, and that Spark's executors may write to this folder, and extract again"
_LAST_LINE = re.compile(r"^(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)


class ExtractOptions(TypedDict, total=False):
    """The less frequent options of `extract`.

    `halves`: also half messages of transactions. `register`: a name under which retention waits for this archive, at
    most `hold` (30 days) after the last window. `delta`: also commit the files to a Delta table at the same path; needs
    the extra `delta`. `accept_gap`: go on although messages were purged before they were extracted; the manifest notes
    the gap. `accept_server`: go on although another server, or another timeline, has the database now. `rows_per_task`:
    the most rows that one task writes (500 000).
    """

    halves: bool
    register: str | None
    hold: timedelta
    delta: bool
    accept_gap: bool
    accept_server: bool
    rows_per_task: int


def extract(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    url: str,
    standby: str | None = None,
    schema: str | None = None,
    topics: Iterable[str] | None = None,
    **options: Unpack[ExtractOptions],
) -> Manifest | None:
    """Extract all messages committed since the archive's last window, as one more window of Parquet files.

    The executors write the files; the manifest that makes them count is written last. A killed extract leaves the
    archive unchanged. The next extract begins where the last manifest ends, so no message is missing and none is there
    twice.

    Args:
        spark: a session, also of Spark Connect.
        path: the folder of the archive, on a disk that the driver and all executors see under this path.
        url: the database's URL, without a password; or `env:NAME`, an environment variable with the URL, set for the
            driver and for every executor.
        standby: a standby of that database, in the same form. Executors read messages from the standby, each after the
            standby has replayed everything up to the end of the window.
        schema: the schema of the tables, on PostgreSQL.
        topics: extract only these; None: all. They must be the same at every extract to one archive.
        options: see `ExtractOptions`.

    Returns:
        The manifest of the window; None if nothing was committed since the last window and nothing was written.

    Raises:
        ArchiveError: the archive cannot be read or written, or another extract has committed the same window.
        PurgedError: messages were purged before they were extracted.
        PositionError: the archive is of another server, or the server has lost messages that the archive has.
        DatabaseError: the database cannot be reached, or refuses.
        MissingExtraError: a package is not installed.
    """
    database = Address(url)
    place = Place(rows=database, schema=schema)
    if standby is not None:
        place = Place(rows=Address(standby, "standby"), planner=database, schema=schema)
    with closing(Extract(Archive(path), place, Extraction(topics=exact_topics(topics), **options))) as job:
        return job.step(spark)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """The settings of an extract: see `extract` and `ExtractOptions`. `topics`: only these; None: all."""

    topics: tuple[str, ...] | None = None
    halves: bool = False
    register: str | None = None
    hold: timedelta = timedelta(days=30)
    delta: bool = False
    accept_gap: bool = False
    accept_server: bool = False
    rows_per_task: int = ROWS_PER_TASK
    empty_after: timedelta = EMPTY_AFTER


#: Every message except half messages.
EVERYTHING = Extraction()


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """The next window of an archive.

    `gone`: the position up to which messages were purged before the window is read; None: none were. `gap`: the same
    position, if messages of this window were purged and the caller accepts the loss.
    """

    stamp: Stamp
    window: Window
    gone: Position | None
    gap: Position | None


class Extract:
    """Extracts window after window to one archive."""

    def __init__(self, archive: Archive, place: Place, wanted: Extraction = EVERYTHING) -> None:
        self._archive = archive
        self._place = place
        self._wanted = wanted
        self._planner = Planner(place)
        self._registration = None
        if wanted.register is not None:
            self._registration = Registration(wanted.register, wanted.hold, place, archive)
        self._begun = False

    def require_possible(self) -> None:
        """Refuse, with the errors of `extract`, what could not add a window, without Spark; nothing is written."""
        last = self._archive.last()
        self._archive.require_writable()
        self._require_same_messages(last)
        # Planned, so that a missing right on the messages shows, too.
        self._planner.tasks(self._next(last).window)
        if self._registration is not None:
            self._registration.require_possible(last)

    def step(self, spark: SparkSession) -> Manifest | None:
        """Extract the messages committed since the last window; return the new manifest. Errors: see `extract`.

        Return None if nothing was committed and nothing was written. After some idle time (see
        `Extraction.empty_after`) commit an empty window.
        """
        last = self._archive.last()
        self._begin(last)
        captured_at = datetime.now(UTC)
        found = self._next(last)
        number = 1 if last is None else last.window + 1
        files = self._extracted(spark, number, found)
        is_due = last is None or datetime.now(UTC) - last.captured_at >= self._wanted.empty_after
        if not files and found.gap is None and not is_due:
            return None
        manifest = Manifest(
            window=number,
            server=found.stamp.server,
            since=found.window.base,
            until=found.stamp.position,
            captured_at=captured_at,
            files=sorted_files(files),
            topics=self._wanted.topics,
            halves=self._wanted.halves,
            gap=found.gap,
        )
        self._archive.commit(manifest)
        # The manifest is committed: the database and the Delta table follow.
        if self._registration is not None:
            self._registration.advance(manifest)
        self._settle_delta()
        return manifest

    def close(self) -> None:
        """Close the connection."""
        self._planner.close()

    def _begin(self, last: Manifest | None) -> None:
        """Check at the first step that the archive holds the same messages, and register its position."""
        if self._begun:
            return
        self._require_same_messages(last)
        self._archive.require_writable()
        if self._registration is not None:
            self._registration.begin(last, self._wanted.topics)
        self._settle_delta()
        self._begun = True

    def _settle_delta(self) -> None:
        if self._wanted.delta:
            from outbox.spark.delta import commit_missing

            commit_missing(self._archive)

    def _require_same_messages(self, last: Manifest | None) -> None:
        """Raise if the archive has other topics, or only one of archive and extract has half messages."""
        wanted = self._wanted
        if last is None or (last.topics, last.halves) == (wanted.topics, wanted.halves):
            return
        has = "all topics" if last.topics is None else f"the topics {','.join(last.topics)}"
        halves = "with" if last.halves else "without"
        raise ArchiveError(
            f"{self._archive.path} holds {has} {halves} half messages; other messages of its windows would be missing."
            " Extract the same, or to another folder"
        )

    def _next(self, last: Manifest | None) -> Next:
        """Return the window from where the archive ends to now; raise if the database cannot go on there."""
        stamp = self._planner.now()
        if last is not None:
            self._require_same_server(last, stamp)
        window = Window(EARLIEST if last is None else last.until, stamp.position)
        # Asked once, here: rows that are purged later are noticed when the window is read.
        gone = self._planner.purged()
        return Next(stamp=stamp, window=window, gone=gone, gap=self._gap(window, gone))

    def _require_same_server(self, last: Manifest, stamp: Stamp) -> None:
        if last.server != stamp.server and not self._wanted.accept_server:
            raise PositionError(
                f"{self._archive.path} was extracted from another server, timeline or outbox"
                f" ({stamp.server.unlike(last.server)}), so its position means nothing here, and messages could be"
                " missed. Extract to another folder; or, if this server goes on with the same ids (after pg_upgrade, or"
                " a failover that lost nothing), accept the server: --accept-server, or accept_server=True"
            )
        if stamp.position.head < last.until.head:
            raise PositionError(
                f"{self._archive.path} is at {last.until}, but {self._place.primary_label()} only at {stamp.position}:"
                " the database has gone back, to a backup say, and draws ids anew that the archive has. Extract to"
                " another folder"
            )

    def _gap(self, window: Window, gone: Position | None) -> Position | None:
        """Return `gone` if messages of the window were purged and the caller accepts the loss; None if none were.

        The first window begins with the messages that exist, so the first window has no gap.
        """
        if window.base == EARLIEST or gone is None or not window.overlaps(gone):
            return None
        if self._wanted.accept_gap:
            return gone
        raise PurgedError(
            f"messages after {window.base}, where {self._archive.path} ends, were purged before they were extracted:"
            f" purge has come to {gone}. Keep them longer (--older-than of the purge), or let retention wait for this"
            " extract (--register NAME --hold 30d). To go on with the messages that are left, and have the gap noted in"
            " the manifest: --accept-gap, or accept_gap=True"
        )

    def _extracted(self, spark: SparkSession, number: int, found: Next) -> list[ArchivedFile]:
        """Have the executors write the files of a window; raise if more rows were purged, or another server answers."""
        base, target = found.window.base, found.window.target
        # Rows that were gone before are not required: `_next` has refused or accepted their loss.
        whole = Window(base if found.gone is None else base.union(found.gone), target)
        wanted = self._wanted
        tasks = self._planner.tasks(
            found.window,
            narrowing=Narrowing(topics=wanted.topics or (), halves=wanted.halves),
            rows_per_task=wanted.rows_per_task,
            whole=whole,
        )
        if others := [task.server for task in tasks if task.server != found.stamp.server]:
            raise PositionError(
                f"{self._place.primary_label()} leads to another server, timeline or outbox"
                f" ({others[0].unlike(found.stamp.server)}) than when the window began; nothing was written: extract"
                " again"
            )
        files: list[ArchivedFile] = []
        if tasks:
            with explained():
                files = run(spark, Work(self._archive.path, number, tuple(tasks)))
        self._planner.require_unpurged(whole)
        return files


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that executors need for one window."""

    root: Path
    window: int
    tasks: tuple[Task, ...]


def run(spark: SparkSession, work: Work) -> list[ArchivedFile]:
    """Have Spark run every task, and again if an executor is lost; return the files of the runs that count."""
    from pyspark.sql.functions import udf

    # Plain functions and `range` also work over Spark Connect; functions over Arrow batches need pandas.
    task = udf(lambda number: [asdict(file) for file in files_of(work, number)], _FILES, useArrow=False)
    numbers = spark.range(0, len(work.tasks), 1, len(work.tasks))
    # Spark may call a deterministic function twice for a row.
    rows = numbers.select(task.asNondeterministic()("id").alias("files")).collect()
    return [ArchivedFile(**file.asDict()) for row in rows for file in row.files]


def files_of(work: Work, number: int) -> list[ArchivedFile]:
    """Write the messages of one task, on an executor, and return the files; an error deletes them."""
    from outbox.spark.fetch import batches

    files = TaskFiles(work.root, f"{work.window:08}-{number:04}")
    try:
        with closing(batches(work.tasks[number])) as found:
            for batch in found:
                files.write(batch)
        return files.close()
    except BaseException:
        files.delete()
        raise


@contextmanager
def explained() -> Iterator[None]:
    """Turn Spark's report about a failed executor into the error that the executor raised."""
    try:
        yield
    except OutboxError:
        raise
    except Exception as error:
        text = str(error)
        ours = _OURS.findall(text)
        if ours:
            name, said = ours[-1]
            kind: Any = getattr(errors, name, ArchiveError)
            raise (kind(said) if name not in _WITH_PARTS else ArchiveError(said)) from error
        if "No module named 'outbox" in text:
            raise ArchiveError("outbox-log is not installed on Spark's executors; install the package there") from error
        lines = _LAST_LINE.findall(text) or [text.strip().partition("\n")[0]]
        fix = _OF_THE_DISK if lines[-1].startswith(_OS_ERRORS) else "mend the cause, and extract again"
        raise ArchiveError(f"Spark could not write the window: {lines[-1]:.300}; none of it counts; {fix}") from error
