"""Fetching: an executor reads a task's rows as record batches. After a break the read goes on after the last row."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tenacity.wait import wait_exponential, wait_random

from outbox.errors import DatabaseError, PositionError, PurgedError, StandbyError
from outbox.model.position import Position, Window
from outbox.model.retry import seconds_to_wait
from outbox.spark.connections import Connection, driver_of, refused
from outbox.spark.place import Place
from outbox.spark.tables import arrow_schema
from outbox.store.log import extraction
from outbox.store.log.extraction import Extraction
from outbox.store.log.stamp import Server

if TYPE_CHECKING:
    import pyarrow as pa

    Batches = Generator[pa.RecordBatch, None, None]

#: At least six seconds pass before the fifth try, because a server that is restarted needs them.
PAUSE = wait_exponential(multiplier=0.4, max=10) + wait_random(0, 0.2)
#: Seconds that a standby may take to replay the log of its primary.
_REPLAY_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Rows that one executor reads, in the order of their key. Pickled, so without a connection and without a secret.

    `server`: the server of the rows; another server has the same numbers for other rows. `retries`: how often in a row
    a connection may break without a new row. `whole`: no row of this window may be purged until the task is done; None:
    nothing is checked. `replayed`: a standby must have replayed its primary's log up to here before the task reads its
    rows. `batch_bytes`: the size of a record batch, about.
    """

    place: Place
    server: Server
    extraction: Extraction
    retries: int = 5
    whole: Window | None = None
    replayed: str | None = None
    batch_bytes: int = 4 * 1024 * 1024


def batches(task: Task) -> Batches:
    """Read the rows of a task in the order of their key, each batch of exactly the Arrow schema of its columns.

    Close the generator to stop early. No row comes twice and none is left out, however often the connection breaks.

    Raises:
        PurgedError: retention has removed rows of the task's window.
        PositionError: another server answers than the task was planned on.
        StandbyError: a standby answers, and the task was planned without a standby.
        DatabaseError: the connection is lost for good, or the server refuses.
        MissingExtraError: pyarrow or the driver is not installed.
    """
    wanted = task.extraction
    schema = arrow_schema(wanted.table, wanted.selected)
    places = [wanted.selected.index(name) for name in extraction.key_of(wanted.table)]
    broken = driver_of(wanted.dialect).errors()
    after: tuple[object, ...] | None = None
    failures = 0
    while True:
        try:
            for batch in _read(task, schema, after):
                if not batch.num_rows:
                    continue
                after = tuple(batch.column(i)[batch.num_rows - 1].as_py() for i in places)
                failures = 0
                # A key that was not asked for is read all the same, to go on after it.
                yield batch if wanted.selected == wanted.columns else batch.select(list(wanted.columns))
            return
        except broken as error:
            fatal = refused(error)
            if fatal is not None:
                raise fatal from error
            failures += 1
            if failures > task.retries:
                raise _lost(task, after, error) from error
        time.sleep(seconds_to_wait(PAUSE, failures))


def _read(task: Task, schema: pa.Schema, after: tuple[object, ...] | None) -> Batches:
    """Read the rows after `after` by one connection, and check at the end that none were purged meanwhile."""
    with closing(driver_of(task.extraction.dialect)(task.place.rows.resolve())) as connection:
        _require_same_server(task, connection)
        if task.replayed is not None:
            _wait_for_replay(task, connection, task.replayed)
            # For a standby that was promoted meanwhile the wait ends at once, perhaps without the rows.
            _require_same_server(task, connection)
        statement = task.extraction.statement(after)
        with closing(connection.batches(statement, schema, task.batch_bytes)) as found:
            yield from found
        _require_unpurged(task, connection)


def _require_same_server(task: Task, connection: Connection) -> None:
    planned = task.server
    system, timeline, installation = connection.row(extraction.server(planned.dialect, task.extraction.schema))
    # A standby does not tell its timeline.
    here = replace(planned, system=system, timeline=timeline or planned.timeline, installation=installation)
    if here != planned:
        raise PositionError(
            f"{task.place.label()} is another server, timeline or outbox now ({here.unlike(planned)}) than when the"
            " read was planned; read again"
        )
    if timeline is None and task.server.timeline is not None and task.replayed is None:
        raise StandbyError(
            f"{task.place.label()} is a standby, which may not have all rows yet, and was not planned for:"
            " add target_session_attrs=read-write to a URL of several hosts; to read from the standby, set plannerUrl"
            " to the primary"
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
            f"rows of {task.place.label()} were purged during the read: keep messages longer (--older-than"
            " of the purge), or set failOnDataLoss=false to read the rows that are left"
        )


def _lost(task: Task, after: tuple[object, ...] | None, error: Exception) -> DatabaseError:
    came = "before the first row" if after is None else f"after {', '.join(map(str, after))}"
    reason = str(error).strip().partition("\n")[0]
    return DatabaseError(
        f"the connection to {task.place.label()} was lost {came}, and {task.retries} tries to read on failed: {reason};"
        " raise the option retries if the server needs longer to come back"
    )
