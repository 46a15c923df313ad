"""Broken twins: the library with one small part replaced by what comes to mind first. The suite has to catch each."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from outbox.errors import LeaseLostError
from outbox.model.lease import Lease
from outbox.model.position import Position, Progress
from outbox.store.database import Channel
from outbox.store.dialects.dialect import Dialect
from outbox.store.dialects.postgresql.dialect import DIALECT as POSTGRESQL
from outbox.store.dialects.statements import Sql
from outbox.store.log.cursor import Batch, Cursor
from outbox.store.log.log import Log, Page
from outbox.store.subscriptions.progress import ProgressLog
from outbox.worker import subscription
from outbox.worker.fetch import Prefetcher
from outbox.worker.partition import PartitionWorker
from outbox.worker.settle import Settlement
from outbox.worker.waiting import Wait
from tests.support.dialects import varied


def replaced(statement: str, **parts: tuple[str, str]) -> str:
    """A statement with parts of it replaced. A part that is not there any more would leave the twin sound."""
    for name, (old, new) in parts.items():
        assert old in statement, f"the twin has to be brought up to date: no {name} in {statement}"
        statement = statement.replace(old, new)
    return statement


#: The reader that remembers the last id it saw: whoever commits later with a lower one is passed over.
_LAST = "concat(coalesce(max(id), 0) + 1, ':', coalesce(max(id), 0) + 1, ':') FROM {message}"
_READ_AFTER_LAST = replaced(
    POSTGRESQL.reads.read_on,
    snapshot=("pg_current_snapshot()::text", f"(SELECT {_LAST})"),
    fresh=("xact_id >= CAST(:head AS bigint)", "id >= CAST(:head AS bigint)"),
    order=("ORDER BY xact_id, id LIMIT :limit)\n", "ORDER BY id LIMIT :limit)\n"),
)
ID_AFTER_LAST = varied(
    POSTGRESQL,
    read_on=_READ_AFTER_LAST,
    read_on_fresh=_READ_AFTER_LAST,
    page=replaced(POSTGRESQL.reads.page, number=("xact_id", "id")),
    page_late=replaced(POSTGRESQL.reads.page, number=("xact_id", "id")),
    extent=replaced(POSTGRESQL.reads.extent, number=("xact_id", "id")),
)

#: The reader that stays below the oldest transaction that runs: loses nothing, and delivers effects before causes.
_FLOOR = "pg_snapshot_xmin(pg_current_snapshot())::text"
_READ_BELOW_FLOOR = replaced(
    POSTGRESQL.reads.read_on,
    snapshot=("pg_current_snapshot()::text", f"concat({_FLOOR}, ':', {_FLOOR}, ':')"),
    fresh=("xact_id >= CAST(:head AS bigint)", f"xact_id >= CAST(:head AS bigint) AND xact_id < {_FLOOR}::bigint"),
)
BELOW_FLOOR = varied(POSTGRESQL, read_on=_READ_BELOW_FLOOR, read_on_fresh=_READ_BELOW_FLOOR)


class OrderedByXid(Log):
    """Sorts by the number of the transaction, which may have been drawn long before the lock on the key."""

    def read_on(self, channel: Channel, base: Position) -> Page:
        """As the log reads, in another order."""
        page = super().read_on(channel, base)
        ids = [row[0] for row in page.rows]
        rows = channel.rows("SELECT id, xact_id FROM outbox_message WHERE id = ANY(CAST(:ids AS bigint[]))", ids=ids)
        numbers: dict[int, int] = dict(rows)
        return replace(page, rows=sorted(page.rows, key=lambda row: (numbers[row[0]], row[0])))


class MarksFirst(PartitionWorker):
    """Settles a batch, and hands it over then."""

    def _handle(self, batch: Batch, *, postpone: bool) -> Generator[Wait, None, None]:
        if batch.messages:
            self._store(batch.end)
            for each in self._batch_handler.run(batch.messages, quota=0):
                if isinstance(each, Wait):
                    yield each


class RemembersItsBase(Prefetcher):
    """Goes on from the position in its memory, whatever server it finds."""

    memory: Progress | None = None

    def __init__(self, channel: Channel, cursor: Cursor) -> None:
        super().__init__(channel, cursor)
        if self.memory is not None:
            cursor.move_to(self.memory)

    def read(self) -> Batch:
        """As the library reads, without a look at whose position it is."""
        batch = super().read()
        self.forget().move_to(batch.end)
        RemembersItsBase.memory = batch.end
        return replace(batch, page=replace(batch.page, capture=None))


class SettlesWithoutEpoch(ProgressLog):
    """Appends progress whoever holds the lease."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._settle = Sql(replaced(self._settle, fence=("AND epoch = :epoch AND owner = :owner AND", "AND")))

    def settle(self, lease: Lease, n: int, progress: Progress, incarnation: str, highest: int | None = None) -> bool:
        """Under the newest epoch."""
        name = lease.partition.subscription
        ((epoch,),) = self._channel.rows("SELECT max(epoch) FROM {lease} WHERE subscription = :name", name=name)
        ((last,),) = self._channel.rows("SELECT max(n) FROM {progress} WHERE subscription = :name", name=name)
        return super().settle(replace(lease, epoch=epoch), last + n, progress, incarnation, highest)


class ParksWithoutEpoch(Settlement):
    """Parks whoever holds the lease."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Asks nobody."""
        with self._channel.transaction():
            yield

    def _append(self, end: Progress) -> None:
        with suppress(LeaseLostError):
            super()._append(end)


DIALECTS = {"id_after_last": ID_AFTER_LAST, "below_floor": BELOW_FLOOR}


def install(name: str | None) -> Dialect | None:
    """Make this process one of the twins; returns the dialect to use, if it is another."""
    if name == "marks_first":
        setattr(subscription, "PartitionWorker", MarksFirst)  # noqa: B010  # type checkers take a class for a constant
    elif name is not None:
        return DIALECTS[name]
    return None
