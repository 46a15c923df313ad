"""The data source `outbox`: the classes that Spark calls. The planner, the follower and the fetch do the work.

Spark imports this file in every session that uses any Python source. So slow modules are imported at their first use.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # Spark before 4.2 has neither limits nor an end for streams

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """A stand-in for the class that this version of Spark does not have."""

    ReadAllAvailable = ReadMaxRows = None  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from outbox.model.position import Position, Window
    from outbox.spark.offset import Mark, Offset
    from outbox.spark.options import Options
    from outbox.spark.registration import StreamRegistration
    from outbox.spark.stream import Follower
    from outbox.store.log.stamp import Stamp


@dataclass(frozen=True, slots=True)
class Frozen:
    """The window of a DataFrame, chosen at `load()`.

    `whole`: no row of this window may be purged unread; None: nothing is checked.
    """

    window: Window
    whole: Window | None


class OutboxDataSource(DataSource):
    """Reads an outbox: `spark.read.format("outbox")`, `spark.readStream.format("outbox")`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        from outbox.spark.options import Options

        super().__init__(options)
        self._settings = Options(dict(options))
        self._frozen = _freeze(self._settings)

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(…)`."""
        return "outbox"

    def schema(self) -> str:
        """Return the columns that the options name, or all columns of the table."""
        from outbox.spark.tables import ddl

        return ddl(self._settings.table, self._settings.columns)

    def reader(self, schema: StructType) -> OutboxReader:
        """Return the reader for `spark.read`; the schema is the user's, if the user gave one."""
        self._settings.require_batch()
        return OutboxReader(self._settings, self._frozen, _columns_of(self._settings, schema))

    def streamReader(self, schema: StructType) -> OutboxStreamReader:  # noqa: N802 - Spark's name
        """Return the reader for `spark.readStream`."""
        return OutboxStreamReader(self._settings, schema)


class OutboxReader(DataSourceReader):
    """A read of a DataFrame."""

    def __init__(self, settings: Options, frozen: Frozen | None, columns: tuple[str, ...]) -> None:
        self._settings = settings
        self._frozen = frozen
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks of the read."""
        from outbox.spark.planner import Planner

        settings = self._settings
        with closing(Planner(settings.place, retries=settings.retries)) as planner:
            if self._frozen is None:
                task = planner.table_task(settings.table, columns=self._columns, narrowing=settings.narrowing)
                return [InputPartition(task)]
            if self._frozen.whole is not None:
                planner.require_unpurged(self._frozen.whole)
            tasks = planner.tasks(
                self._frozen.window,
                columns=self._columns,
                narrowing=settings.narrowing,
                partitions=settings.partitions,
                rows_per_task=settings.rows_per_partition,
                whole=self._frozen.whole,
            )
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a task."""
        return _read(partition)


class OutboxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A run of a stream. Spark makes the reader in two processes, and pickles the reader for the tasks."""

    def __init__(self, settings: Options, schema: StructType) -> None:
        self._settings = settings
        self._schema = schema
        self._made: Follower | None = None
        self._last: Offset | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which a stream without a checkpoint begins."""
        initial = self._follower().initial()
        # Spark before 4.2 may ask for the end of the first batch before the beginning.
        self._last = self._last or initial
        return initial.to_dict()

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        """Return how many rows a batch may have. Spark asks from version 4.2 on."""
        limit = self._settings.max_rows
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which the next batch ends.

        Spark before 4.2 passes no `start`; then the offset that was returned last counts. A restarted stream has none,
        and its first batch takes all rows: with `availableNow` there is no second batch.
        """
        from outbox.spark.offset import Offset

        follower = self._follower()
        known = self._last if start is None else Offset.from_dict(start)
        most = self._settings.max_rows if limit is None else getattr(limit, "max_rows", None)
        self._last = follower.now() if known is None else follower.latest(known, most)
        return self._last.to_dict()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End the stream at the position of now."""
        self._follower().stop_at_now()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a batch."""
        from outbox.spark.offset import Offset

        columns = _columns_of(self._settings, self._schema)
        tasks = self._follower().tasks(Offset.from_dict(start), Offset.from_dict(end), columns)
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a task."""
        return _read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Tell retention how far a registered stream is. Only Spark's checkpoint keeps the stream's own progress."""
        from outbox.spark.offset import Offset

        if self._settings.reader is not None:
            self._registration(self._settings.reader).advance(Offset.from_dict(end).progress.base)

    def stop(self) -> None:
        """Close the connection."""
        if self._made is not None:
            self._made.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    def _follower(self) -> Follower:
        """Return the follower. The first call makes it, because Spark does not show errors of a constructor."""
        from outbox.spark.planner import Planner
        from outbox.spark.stream import Follower

        if self._made is None:
            self._settings.require_stream()
            _columns_of(self._settings, self._schema)
            if self._settings.reader is not None:
                self._registration(self._settings.reader).begin()
            planner = Planner(self._settings.place, retries=self._settings.retries)
            self._made = Follower(self._settings, planner)
        return self._made

    def _registration(self, name: str) -> StreamRegistration:
        from outbox.spark.registration import StreamRegistration

        return StreamRegistration(name, self._settings.place, self._settings.narrowing.topics)


def _freeze(settings: Options) -> Frozen | None:
    """Choose the window of a DataFrame for all its reads, `since` to `until` or now; None: the table is another."""
    from outbox.errors import OptionError
    from outbox.model.position import EARLIEST, Window
    from outbox.spark.planner import Planner
    from outbox.store.log.extraction import MESSAGES

    if settings.table != MESSAGES:
        return None
    with closing(Planner(settings.place, retries=settings.retries)) as planner:
        now = planner.now()
        base = _checked("since", settings.since, now) if settings.since else EARLIEST
        target = _checked("until", settings.until, now) if settings.until else now.position
        if base.head > target.head:
            raise OptionError(f"since: {base} lies after until, {target}; exchange them")
        window = Window(base, target)
        return Frozen(window, planner.whole(window) if settings.fail_on_data_loss else None)


def _checked(name: str, mark: Mark, now: Stamp) -> Position:
    from outbox.errors import PositionError

    if mark.server is not None and mark.server != now.server:
        raise PositionError(
            f"{name}: the position is of another server, timeline or outbox ({now.server.unlike(mark.server)}), and"
            " means nothing here; take a position from outbox.spark.position() for this url, or read the database that"
            " the position is of"
        )
    if mark.position.head > now.position.head:
        raise PositionError(
            f"{name}: {mark.position} lies ahead of the server, which has come to {now.position}; the position is of"
            " another server, or the server was restored from an older copy"
        )
    return mark.position


def _read(partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
    # For a read without tasks Spark makes a partition whose value is None; in Spark 4.0 the partition itself is None.
    if partition is None or partition.value is None:
        return iter(())
    from outbox.spark.fetch import batches

    return batches(partition.value)


def _columns_of(settings: Options, schema: StructType) -> tuple[str, ...]:
    """Return the columns of a schema; raise `OptionError` for one that the table does not have so."""
    from outbox.errors import OptionError
    from outbox.spark.tables import spark_type
    from outbox.store.log.extraction import columns_of

    kinds = columns_of(settings.table)
    for field in schema.fields:
        if field.name not in kinds:
            raise OptionError(
                f"schema: the table {settings.table} has no column {field.name!r}; choose from {', '.join(kinds)}"
            )
        wanted, given = spark_type(kinds[field.name]), field.dataType.simpleString()
        if given != wanted:
            raise OptionError(f"schema: the column {field.name} is of type {wanted}, not {given}; cast it after load()")
        if not field.nullable:
            raise OptionError(f"schema: the column {field.name} is declared NOT NULL; leave NOT NULL out")
    return tuple(schema.fieldNames())
