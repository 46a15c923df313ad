"""Reading by tasks as Spark's workers do, without Spark."""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from sqlalchemy import Engine

from outbox.spark.fetch import Task, batches
from outbox.spark.place import Address, Place


def place_of(engine: Engine, schema: str | None = None) -> Place:
    """Where the rows of an engine are."""
    return Place(rows=Address(engine.url.render_as_string(hide_password=False)), schema=schema)


def read(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """The rows of tasks, one task after the other."""
    return [row for task in tasks for batch in batches(task) for row in batch.to_pylist()]


def tables_of(tasks: Iterable[Task]) -> pa.Table:
    """All rows as one Arrow table."""
    return pa.Table.from_batches([batch for task in tasks for batch in batches(task)])


def bodies(rows: Sequence[dict[str, Any]]) -> list[bytes]:
    """The bodies of rows."""
    return [row["body"] for row in rows]
