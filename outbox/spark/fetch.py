"""Fetching: reads a task's rows as record batches. After a break of the connection it goes on after the last row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from queue import Full, Queue
from typing import TYPE_CHECKING, Any

from tenacity.wait import wait_exponential, wait_random

from outbox.errors import DatabaseError, PositionError, PurgedError, StandbyError
from outbox.model.position import Position
from outbox.model.retry import seconds_to_wait
from outbox.spark.connections import Connection, broken_by, connected, method_of, refused
from outbox.spark.tables import arrow_schema
from outbox.spark.task import Task
from outbox.store.log import extraction

if TYPE_CHECKING:
    import pyarrow as pa

    Batches = Generator[pa.RecordBatch, None, None]

#: At least six seconds pass before the fifth try, because a server that is restarted needs them.
PAUSE = wait_exponential(multiplier=0.4, max=10) + wait_random(0, 0.2)
#: Seconds that a standby may take to replay what its primary has done.
_REPLAY_SECONDS = 300.0


def batches(task: Task) -> Batches:
    """Read the rows of a task in the order of their key, each batch of exactly the Arrow schema of its columns.

    Close the generator to stop early. No row comes twice and none is left out, however often the connection breaks.

    Raises:
        PurgedError: retention has removed rows of the task's window.
        PositionError: the task was planned on another server than the one that answers.
        StandbyError: a standby answers, and the task was planned without one.
        DatabaseError: the connection is lost for good, or the server refuses.
        MissingExtraError: pyarrow or the driver is not installed.
    """
    found = _resuming(task, method_of(task))
    if task.manner.prefetch:
        found = _ahead(found, task.manner.prefetch)
    with closing(found) as rows:
        yield from rows


def _resuming(task: Task, method: str, *, pause: Callable[[float], object] = time.sleep) -> Batches:
    wanted, number = task.extraction, len(task.extraction.columns)
    schema = arrow_schema(wanted.table, wanted.selected)
    shown = arrow_schema(wanted.table, wanted.columns)
    places = [wanted.selected.index(name) for name in extraction.key_of(wanted.table)]
    broken = broken_by(method)
    after: tuple[object, ...] | None = None
    failures = 0
    while True:
        try:
            for batch in _read(task, method, schema, after):
                if not batch.num_rows:
                    continue
                after = tuple(batch.column(i)[batch.num_rows - 1].as_py() for i in places)
                failures = 0
                yield _of_schema(batch, shown, number)
            return
        except broken as error:
            fatal = refused(error)
            if fatal is not None:
                raise fatal from error
            failures += 1
            if failures > task.manner.retries:
                raise _lost(task, after, error) from error
        pause(seconds_to_wait(PAUSE, failures))


def _read(task: Task, method: str, schema: pa.Schema, after: tuple[object, ...] | None) -> Batches:
    """Read the rows after `after` by one connection, and check at the end that none were purged meanwhile."""
    with connected(task, method) as connection:
        _require_same_server(task, connection)
        if task.replayed is not None:
            _wait_for_replay(task, connection, task.replayed)
            # For a standby that was promoted meanwhile the wait ends at once, and it may never have had the rows.
            _require_same_server(task, connection)
        statement = task.extraction.statement(after)
        with closing(connection.batches(statement, schema, task.manner.batch_bytes)) as found:
            yield from found
        _require_unpurged(task, connection)


def _of_schema(batch: pa.RecordBatch, schema: pa.Schema, number: int) -> pa.RecordBatch:
    if batch.num_columns == number:
        return batch
    import pyarrow as pa

    return pa.RecordBatch.from_arrays(batch.columns[:number], schema=schema)


def _require_same_server(task: Task, connection: Connection) -> None:
    planned = task.server
    system, timeline, installation = connection.row(extraction.server(planned.dialect, task.extraction.schema))
    # A standby does not tell its timeline.
    here = replace(planned, system=system, timeline=timeline or planned.timeline, installation=installation)
    if here != planned:
        raise PositionError(
            f"{task.place.label()} is another server, timeline or outbox now ({here.unlike(planned)}) than the one that"
            " this read was planned on; read again"
        )
    if timeline is None and task.server.timeline is not None and task.replayed is None:
        raise StandbyError(
            f"{task.place.label()} is a standby, which may not have all rows yet, and was not planned for:"
            " add target_session_attrs=read-write to a URL of several hosts; to read from the standby, set plannerUrl,"
            " plannerUrlEnv or plannerService to the primary"
        )


def _wait_for_replay(task: Task, connection: Connection, lsn: str) -> None:
    deadline = time.monotonic() + _REPLAY_SECONDS
    while not connection.row(extraction.replayed(task.server.dialect, lsn))[0]:
        if time.monotonic() > deadline:
            raise DatabaseError(
                f"the standby {task.place.label()} has not replayed its primary's log up to {lsn} within"
                f" {_REPLAY_SECONDS:.0f} s; see pg_stat_replication on the primary, or read from the primary"
            )
        time.sleep(0.05)


def _require_unpurged(task: Task, connection: Connection) -> None:
    if task.whole is None:
        return
    (text,) = connection.row(extraction.purged(task.extraction.schema))
    if text is not None and task.whole.overlaps(Position.parse(text)):
        raise PurgedError(
            f"rows of this read were purged while it went on, in {task.place.label()}: keep messages longer"
            " (outbox purge --older-than), or set failOnDataLoss=false to read what is left"
        )


def _lost(task: Task, after: tuple[object, ...] | None, error: Exception) -> DatabaseError:
    came = "before the first row" if after is None else f"after {', '.join(map(str, after))}"
    reason = str(error).strip().partition("\n")[0]
    return DatabaseError(
        f"the connection to {task.place.label()} was lost {came}, and {task.manner.retries} tries to read on failed:"
        f" {reason}; raise the option retries if the server needs longer to come back"
    )


class _End:
    """The last item that the thread puts into the queue. `error`: why the reading ended; None: all rows were read."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def _ahead(found: Batches, number: int) -> Generator[pa.RecordBatch]:
    """Read `number` batches ahead in a thread, which ends when the generator ends."""
    queue: Queue[Any] = Queue(maxsize=number)
    stop = threading.Event()
    thread = threading.Thread(target=_fill, args=(found, queue, stop), name="outbox-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(each := queue.get(), _End):
            yield each
        if each.error is not None:
            raise each.error
    finally:
        stop.set()
        thread.join()


def _fill(found: Batches, queue: Queue[Any], stop: threading.Event) -> None:
    end = _End()
    try:
        with closing(found) as rows:
            for batch in rows:
                if not _put(queue, batch, stop):
                    return
    except BaseException as error:
        end = _End(error)
    _put(queue, end, stop)


def _put(queue: Queue[Any], each: object, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            queue.put(each, timeout=0.1)
        except Full:
            continue
        return True
    return False
