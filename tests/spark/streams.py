"""A stream as Spark drives it, without Spark; and what Spark's own has written, batch by batch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from sqlalchemy import Engine

from outbox.spark.offset import Offset
from outbox.spark.options import Options
from outbox.spark.planner import Planner
from outbox.spark.stream import Follower
from tests.spark.reading import bodies, read

COLUMNS = ("id", "body")


class Stream:
    """Spark's part: asks for the next offset, reads the batch, and keeps the offset."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        url = engine.url.render_as_string(hide_password=False)
        texts = {"url": url, "pollIntervalMs": "0", **{name: str(value) for name, value in options.items()}}
        self.options = Options(texts)
        self.seconds = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin as a new process does."""
        self.follower = Follower(self.options, Planner(self.options.place, retries=1), clock=lambda: self.seconds)

    def start(self) -> Offset:
        """Where it begins without a checkpoint."""
        return stored(self.follower.initial())

    def next(self, start: Offset, limit: int | None = None) -> tuple[Offset, list[bytes]]:
        """The next batch, and its rows."""
        end = stored(self.follower.latest(start, limit))
        if end == start:
            return end, []
        return end, self.rows(start, end)

    def rows(self, start: Offset, end: Offset) -> list[bytes]:
        """What a batch between two offsets holds."""
        return bodies(read(self.follower.tasks(start, end, COLUMNS)))

    def all(self, start: Offset, limit: int | None = None) -> tuple[Offset, list[list[bytes]]]:
        """Batches until nothing comes."""
        batches: list[list[bytes]] = []
        while True:
            end, rows = self.next(start, limit)
            if end == start:
                return end, batches
            start = end
            batches.append(rows)


def stored(offset: Offset) -> Offset:
    """As it comes back from a checkpoint."""
    return Offset.from_dict(json.loads(json.dumps(offset.to_dict())))


def written(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """The rows that each batch of a file sink has committed, in the order of their ids."""
    log = folder / "_spark_metadata"
    known: set[str] = set()
    for name in sorted((each.name for each in log.iterdir() if not each.name.startswith(".")), key=_number):
        entries = [json.loads(line) for line in (log / name).read_text().splitlines()[1:]]
        files = [entry["path"] for entry in entries if entry["path"] not in known]
        known.update(files)
        rows = [row for file in files for row in pq.read_table(file.removeprefix("file://")).to_pylist()]
        yield sorted(rows, key=lambda row: row["id"])


def _number(name: str) -> int:
    return int(name.removesuffix(".compact"))
