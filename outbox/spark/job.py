"""The extract: Spark's executors write what was committed since the last window to an archive.

Spark only hands out the tasks; no message passes through the JVM. A window is never divided into smaller ones. A cut by
transaction would deliver a key's messages out of order, and a cut by id is not a position. In memory a window needs
only its list of files; its size is limited by the disk. A window that is killed is extracted again as a whole.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox import errors
from outbox.errors import ArchiveError, OutboxError, PositionError
from outbox.model.position import Window
from outbox.spark.continuation import EVERYTHING, Continuation, Extraction, Next
from outbox.spark.files import TaskFiles
from outbox.spark.manifest import FOLDER, RUNNING, Archive, ArchivedFile, Manifest, sorted_files
from outbox.spark.planner import Planner
from outbox.store.log.extraction import Narrowing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from outbox.spark.place import Place
    from outbox.spark.task import Task

_FILES = (
    "array<struct<path string, topic string, day string, rows bigint, bytes bigint, sha256 string, first_id bigint,"
    " last_id bigint>>"
)
#: An error of this library, as it stands in the traceback of an executor.
_OURS = re.compile(r"^outbox\.errors\.(\w+): (.+)$", re.MULTILINE)
#: The beginnings of lines that report a disk error of an executor.
_OS_ERRORS = ("OSError", "PermissionError", "FileNotFoundError", "FileExistsError", "NotADirectoryError")
_OF_THE_DISK = "see that there is room, and that Spark's executors may write to this folder, and extract again"
_LAST_LINE = re.compile(r"^(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """The progress of a window: how many of its tasks are done, and how many rows those have written."""

    window: int
    tasks: int
    done: int
    rows: int


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that executors need for one window.

    `signs`: a folder in which each task makes an empty file when it is done; None: no progress is reported.
    """

    root: Path
    window: int
    tasks: tuple[Task, ...]
    signs: Path | None


class Extract:
    """Extracts window after window to one archive.

    `on_progress` is called `every` so many seconds while a window is written.
    """

    def __init__(
        self,
        spark: SparkSession,
        archive: Archive,
        place: Place,
        wanted: Extraction = EVERYTHING,
        *,
        on_progress: Callable[[Going], object] | None = None,
        every: float = 0.5,
    ) -> None:
        self._spark = spark
        self._archive = archive
        self._place = place
        self._wanted = wanted
        self._on_progress = on_progress
        self._every = every
        self._planner = Planner(place)
        self._continuation = Continuation(archive, place, wanted, self._planner)
        self._begun = False

    def step(self) -> Manifest | None:
        """Extract what was committed since the last window; return its manifest.

        It returns None if nothing was committed and nothing was written. After some idle time (see
        `Extraction.empty_after`) it commits an empty window.

        Raises:
            ArchiveError: the archive cannot be read or written, or holds other topics; or another extract has committed
                the window.
            PurgedError: messages were purged before they were extracted.
            PositionError: the archive is of another server, or the server has lost messages that the archive has.
            DatabaseError: the database cannot be reached, or refuses.
        """
        last = self._archive.last()
        self._begin(last)
        captured_at = datetime.now(UTC)
        found = self._continuation.next(last)
        files = self._extracted(1 if last is None else last.window + 1, found)
        if not files and found.gap is None and not self._is_due(last):
            return None
        manifest = Manifest(
            window=1 if last is None else last.window + 1,
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
        self._store(manifest)
        return manifest

    def close(self) -> None:
        """Close the connection."""
        self._planner.close()

    def _begin(self, last: Manifest | None) -> None:
        """Check at the first step that the archive holds the same messages, and register its position."""
        if self._begun:
            return
        self._continuation.require_same_messages(last)
        self._archive.require_writable()
        wanted = self._wanted
        if wanted.register is not None:
            wanted.register.begin(self._place, self._archive, last, wanted.topics)
        self._settle_delta()
        self._begun = True

    def _store(self, manifest: Manifest) -> None:
        """Store the new position in the database, and commit to the Delta table. The manifest is committed already."""
        if self._wanted.register is not None:
            self._wanted.register.advance(self._place, manifest)
        self._settle_delta()

    def _settle_delta(self) -> None:
        if self._wanted.delta:
            from outbox.spark.delta import commit_missing

            commit_missing(self._archive)

    def _is_due(self, last: Manifest | None) -> bool:
        return last is None or datetime.now(UTC) - last.captured_at >= self._wanted.empty_after

    def _extracted(self, number: int, found: Next) -> list[ArchivedFile]:
        """Have the executors write the files of a window, and return these.

        Raises:
            PurgedError: more rows of the window were purged than those that `found.gone` sees.
            PositionError: another server answers than the one that the window was captured on.
        """
        base, target = found.window.base, found.window.target
        # Rows that were gone before are not required: `Continuation.next` has refused or accepted that.
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
                f" ({others[0].unlike(found.stamp.server)}) than when the window began; nothing was written: run it"
                " again"
            )
        files: list[ArchivedFile] = []
        if tasks:
            with self._watched(number, len(tasks)) as signs, explained():
                files = run(self._spark, Work(self._archive.path, number, tuple(tasks), signs))
        self._planner.require_unpurged(whole)
        return files

    @contextmanager
    def _watched(self, number: int, tasks: int) -> Iterator[Path | None]:
        """Call `on_progress` while the tasks run; each task makes a file in the yielded folder when it is done."""
        if self._on_progress is None:
            yield None
            return
        signs = self._archive.path / FOLDER / f"{number:08}-{uuid.uuid4().hex}{RUNNING}"
        signs.mkdir(parents=True)
        stop, tell = threading.Event(), self._on_progress

        def look() -> None:
            while not stop.wait(self._every):
                done = [path.name.partition("-") for path in signs.iterdir()]
                rows = sum(int(rows) for _, _, rows in done)
                tell(Going(window=number, tasks=tasks, done=len(done), rows=rows))

        thread = threading.Thread(target=look, name="outbox-progress", daemon=True)
        thread.start()
        try:
            yield signs
        finally:
            stop.set()
            thread.join()
            with suppress(OSError):
                for path in signs.iterdir():
                    path.unlink()
                signs.rmdir()


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

    with TaskFiles(work.root, f"{work.window:08}-{number:04}") as files, closing(batches(work.tasks[number])) as found:
        for batch in found:
            files.write(batch)
        done = files.close()
    if work.signs is not None:
        with suppress(OSError):
            (work.signs / f"{number}-{sum(file.rows for file in done)}").touch()
    return done


@contextmanager
def explained() -> Iterator[None]:
    """Turn what Spark says about a failed executor into the error that the executor raised."""
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
            raise ArchiveError("outbox-log is not installed on Spark's executors; install it there, too") from error
        lines = _LAST_LINE.findall(text) or [text.strip().partition("\n")[0]]
        fix = _OF_THE_DISK if lines[-1].startswith(_OS_ERRORS) else "mend that, and extract again"
        raise ArchiveError(f"Spark could not write the window: {lines[-1]:.300}; none of it counts; {fix}") from error


#: Errors that cannot be made from one text.
_WITH_PARTS = {"InvalidMessageError", "VerdictStandsError"}
