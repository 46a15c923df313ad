"""Writing the messages of a task into Parquet files by topic and day, in bounded memory."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.spark.manifest import ArchivedFile, flush_folder, partition_of

if TYPE_CHECKING:
    from io import BufferedIOBase

    import pyarrow as pa

#: The size of a row group before compression, about; and the most bytes that may wait, in all files together, for the
#: row groups that they will be part of.
ROW_GROUP_BYTES, WAITING_BYTES = 16 * 1024 * 1024, 48 * 1024 * 1024
#: The most files that are open at a time. Systems let a process open 1024 files, some only 256.
MOST_OPEN = 100
#: Columns whose values repeat. For other columns a dictionary costs time, and the writer discards it.
_REPEATING = ["topic", "key", "slot", "tags", "content_type", "xact_id"]


class TaskFiles:
    """Writes the batches of a task to files. `close` returns the files, `delete` is for a task that fails."""

    def __init__(self, root: Path, stem: str) -> None:
        self._root = root
        self._stem = stem
        self._open: dict[tuple[str, str], _File] = {}
        self._done: list[ArchivedFile] = []
        self._paths: list[Path] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows, in the order of their ids, to the files of their topics and days."""
        for topic, day, rows in _by_folder(batch) if len(batch) else ():
            file = self._open.pop((topic, day), None) or self._opened(topic, day, batch.schema)
            # Put last: when too many files are open, the first is finished, which was not written to for longest.
            self._open[topic, day] = file
            file.append(rows)
        while sum(file.waiting for file in self._open.values()) > WAITING_BYTES:
            max(self._open.values(), key=lambda file: file.waiting).flush()

    def close(self) -> list[ArchivedFile]:
        """Finish all files, flush files and folders to disk, and return the files."""
        while self._open:
            self._finish(next(iter(self._open)))
        # A task without rows makes no folder, not even that of the archive.
        for folder in sorted({each for path in self._paths for each in (path.parent, path.parent.parent, self._root)}):
            flush_folder(folder)
        return self._done

    def delete(self) -> None:
        """Delete all files, finished or not."""
        for file in self._open.values():
            with suppress(Exception):
                file.abandon()
        for path in self._paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _opened(self, topic: str, day: str, schema: pa.Schema) -> _File:
        if len(self._open) >= MOST_OPEN:
            self._finish(next(iter(self._open)))
        path = self._root / partition_of(topic, day) / f"{self._stem}-{uuid.uuid4()}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._paths.append(path)
        return _File(path, topic, day, schema)

    def _finish(self, key: tuple[str, str]) -> None:
        self._done.append(self._open.pop(key).finish(self._root))


class _File:
    """A Parquet file under way."""

    def __init__(self, path: Path, topic: str, day: str, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self._path, self._topic, self._day = path, topic, day
        self._writer = pq.ParquetWriter(
            path,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=[name for name in _REPEATING if name in schema.names],
            # No query needs the smallest body or headers, and both may be large.
            write_statistics=[name for name in schema.names if name not in ("body", "headers")],
        )
        self._batches: list[pa.RecordBatch] = []
        self._first: int | None = None
        self._last = self._rows = 0
        self.waiting = 0

    def append(self, batch: pa.RecordBatch) -> None:
        """Keep rows for the next row group, and write a group that is large enough."""
        ids = batch.column("id")
        if self._first is None:
            self._first = ids[0].as_py()
        self._last = ids[len(ids) - 1].as_py()
        self._rows += len(ids)
        self._batches.append(batch)
        self.waiting += batch.nbytes
        if self.waiting >= ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the kept rows as a row group."""
        import pyarrow as pa

        if self._batches:
            table = pa.Table.from_batches(self._batches)
            self._writer.write_table(table, row_group_size=max(1, len(table)))
        self._batches, self.waiting = [], 0

    def finish(self, root: Path) -> ArchivedFile:
        """Write the kept rows and the end of the file, and flush the file to disk."""
        self.flush()
        self._writer.close()
        with self._path.open("rb+") as file:
            os.fsync(file.fileno())
            digest = sha256_of(file)
            size = file.tell()
        assert self._first is not None
        return ArchivedFile(
            path=self._path.relative_to(root).as_posix(),
            topic=self._topic,
            day=self._day,
            rows=self._rows,
            bytes=size,
            sha256=digest,
            first_id=self._first,
            last_id=self._last,
        )

    def abandon(self) -> None:
        """Close the file unfinished."""
        self._writer.close()


def sha256_of(file: BufferedIOBase) -> str:
    """Return the checksum of a file's bytes, as in manifests. Reads the file to its end."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def _by_folder(batch: pa.RecordBatch) -> Iterator[tuple[str, str, pa.RecordBatch]]:
    """Divide rows by topic and day, each part in the order of its ids.

    Each of several parts is a copy, and keeps no memory of the others.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    days = batch.column("created_at").cast(pa.date32()).cast(pa.int32())
    topics = batch.column("topic").dictionary_encode()
    first, last = (day.as_py() for day in pc.min_max(days).values())
    if len(topics.dictionary) == 1 and first == last:
        yield topics.dictionary[0].as_py(), _day(first), batch
        return
    # The codes are small numbers, which Arrow sorts by counting; rows of one folder stay in their order.
    codes = pc.add(pc.multiply(topics.indices, last - first + 1), pc.subtract(days, first))
    order = pc.sort_indices(codes)
    runs = pc.run_end_encode(codes.take(order))
    start = 0
    for end, code in zip(runs.run_ends.to_pylist(), runs.values.to_pylist(), strict=True):
        topic, day = divmod(code, last - first + 1)
        yield topics.dictionary[topic].as_py(), _day(first + day), batch.take(order.slice(start, end - start))
        start = end


def _day(number: int) -> str:
    """Return a day in ISO form, from its number of days since 1970-01-01."""
    return str(date(1970, 1, 1) + timedelta(days=number))
