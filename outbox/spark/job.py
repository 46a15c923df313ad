"""The extract: what was committed since the last window goes to an archive, written by Spark's executors themselves.

Spark hands out the tasks and nothing else; no message passes through the JVM. A window is never cut: a cut by
transaction would deliver a key's messages out of order, and one by id is no position. What a window needs in memory is
its list of files; how large it may be is bounded by the disk. A window that is killed is done again as a whole.
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
from outbox.spark.manifest import FOLDER, Archive, ArchivedFile, Manifest, sorted_files
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
_LOOK_EVERY_SECONDS = 0.5
#: An error of this library, as it stands in what Python wrote about an executor's.
_OURS = re.compile(r"^outbox\.errors\.(\w+): (.+)$", re.MULTILINE)
#: How the lines begin that tell what an executor met on a disk.
_OS_ERRORS = ("OSError", "PermissionError", "FileNotFoundError", "FileExistsError", "NotADirectoryError")
_OF_THE_DISK = "see that there is room, and that Spark's executors may write to this folder, and extract again"
_LAST_LINE = re.compile(r"^(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """How far a window is: how many of its tasks are done, and how many rows those have written."""

    window: int
    tasks: int
    done: int
    rows: int


@dataclass(frozen=True, slots=True)
class Work:
    """What executors get: everything about one window. `signs`: where each task leaves a sign when it is done."""

    root: Path
    window: int
    tasks: tuple[Task, ...]
    signs: Path | None


class Extract:
    """Extracts window after window to one archive. `on_progress` is called twice a second while one is written."""

    def __init__(
        self,
        spark: SparkSession,
        archive: Archive,
        place: Place,
        wanted: Extraction = EVERYTHING,
        *,
        on_progress: Callable[[Going], object] | None = None,
    ) -> None:
        self._spark = spark
        self._archive = archive
        self._place = place
        self._wanted = wanted
        self._on_progress = on_progress
        self._planner = Planner(place)
        self._continuation = Continuation(archive, place, wanted, self._planner)
        self._begun = False

    def step(self) -> Manifest | None:
        """Extract what has been committed since the last window; None: there was nothing, and nothing was written.

        Raises:
            ArchiveError: the archive cannot be read or written, another extract has committed the window, or holds
                other topics.
            PurgedError: messages were purged before they were extracted.
            PositionError: the archive is of another server, or the server has lost what the archive has.
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
        """Give the connection up."""
        self._planner.close()

    def _begin(self, last: Manifest | None) -> None:
        """Once: see that the archive is of the same messages, and tell the database how far it is."""
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
        """Tell others what the archive has now; the manifest itself is what counts."""
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
        """Have the executors write the files of a window, of which nothing more is purged than was gone before."""
        base, target = found.window.base, found.window.target
        # What is gone already is not asked for: it has been judged.
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
        """Tell whoever wants to know how far the tasks are, by signs that each leaves when it is done."""
        if self._on_progress is None:
            yield None
            return
        signs = self._archive.path / FOLDER / f"{uuid.uuid4().hex}.running"
        signs.mkdir(parents=True)
        stop, tell = threading.Event(), self._on_progress

        def look() -> None:
            while not stop.wait(_LOOK_EVERY_SECONDS):
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
    """Have Spark run every task once, or again where an executor was lost; return the files of those that count."""
    from pyspark.sql.functions import udf

    # Plain functions and `range` are there over Spark Connect, too; those that take Arrow's batches want pandas.
    task = udf(lambda number: [asdict(file) for file in files_of(work, number)], _FILES, useArrow=False)
    numbers = spark.range(0, len(work.tasks), 1, len(work.tasks))
    # Deterministic functions may be called twice for a row.
    rows = numbers.select(task.asNondeterministic()("id").alias("files")).collect()
    return [ArchivedFile(**file.asDict()) for row in rows for file in row.files]


def files_of(work: Work, number: int) -> list[ArchivedFile]:
    """Write the messages of one task, on an executor; on an error nothing of it stays."""
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


#: Errors that are not made of one text.
_WITH_PARTS = {"InvalidMessageError", "VerdictStandsError"}
