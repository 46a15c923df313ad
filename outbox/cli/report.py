"""`outbox report`: findings of Spark about a log, as tables, JSON and pictures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from outbox.cli.options import NAMES, Target, about_a_database, as_json, option, together
from outbox.cli.output import say, show_json, show_table
from outbox.cli.spark import Cluster, on_spark, require_drawable, session, source_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from outbox.store.database import Channel

F = TypeVar("F", bound=Callable[..., Any])
Row = Mapping[str, Any]

_SHOWN, _MOST_POINTS = 80, 20_000
#: Verdicts within this time before the end of an archive may belong to messages after its end.
_BEFORE_THE_END = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a report: name in JSON, title, rows, and the columns for people."""

    name: str
    title: str
    rows: Sequence[Row]
    columns: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output of a report: JSON or text, and the file of a picture."""

    json: bool
    plot: Path | None

    def show(self, *tables: Table, more: bool = False, **extra: object) -> None:
        """Show the tables of a report. `more`: a table was cut. `extra`: further fields of the JSON."""
        if self.json:
            show_json({**extra, **{table.name: table.rows for table in tables}}, more=more)
            return
        for table in tables:
            click.echo(f"{table.title}:")
            if table.rows:
                headers = {name: name.replace("_", " ").upper() for name in table.columns}
                numbers = [title for name, title in headers.items() if any(_is_number(row[name]) for row in table.rows)]
                rows = [[_shown(row[name]) for name in table.columns] for row in table.rows]
                show_table([*headers.values()], rows, numbers=numbers)
            else:
                click.echo("none")
            click.echo()


@dataclass(frozen=True, slots=True)
class Work:
    """The database and the archive of a report, and the place of Spark."""

    target: Target
    archive: Path | None
    cluster: Cluster

    @contextmanager
    def begun(self) -> Iterator[tuple[Log, Channel]]:
        """Look for the archive, open the database, and start Spark last, because Spark takes a while."""
        from outbox.spark import register
        from outbox.spark.manifest import Archive

        if self.archive is not None:
            Archive(self.archive).newest()
        with self.target.open_outbox() as channel:
            source = source_options(self.target, local=self.cluster.is_local)
            with session(cluster=self.cluster) as spark:
                register(spark)
                yield Log(spark, source, self.archive), channel


@dataclass(frozen=True, slots=True)
class Log:
    """The data of a report: the tables of a database, and messages there or in an archive."""

    spark: SparkSession
    source: Mapping[str, str]
    archive: Path | None

    def messages(self, columns: str, *, halves: bool = False, topics: Sequence[str] | None = None) -> DataFrame:
        """Return the messages with at least the named columns."""
        if self.archive is not None:
            from outbox.spark import archived

            return archived(self.spark, self.archive, topics=topics)
        options = {} if topics is None else {"topics": ",".join(topics)}
        return self._read({**options, "halves": str(halves).lower()}, columns)

    def windows(self, topics: Sequence[str] | None) -> DataFrame:
        """Return the messages of the archive, with numbers of windows."""
        from outbox.spark import archived
        from outbox.spark.reports.order import with_window

        assert self.archive is not None
        return with_window(archived(self.spark, self.archive, topics=topics))

    def table(self, name: str, columns: str | None = None) -> DataFrame:
        """Return another table of the database."""
        return self._read({"table": name}, columns)

    def _read(self, options: Mapping[str, str], columns: str | None) -> DataFrame:
        # The columns are no schema: with one, Spark decides at the first action, and not here, which messages it reads.
        names = {} if columns is None else {"columns": ",".join(field.split()[0] for field in columns.split(", "))}
        return self.spark.read.format("outbox").options(**self.source, **options, **names).load()


def reported(function: F) -> F:
    """Give a report the common options."""

    @functools.wraps(function)
    def command(
        *, target: Target, json: bool, plot: Path | None, archive: Path | None, cluster: Cluster, **rest: Any
    ) -> Any:
        require_drawable(plot)
        return function(work=Work(target, archive, cluster), output=Output(json=json, plot=plot), **rest)

    path = click.Path(path_type=Path)
    return together(  # type: ignore[return-value]
        about_a_database,
        option("--archive", type=path, metavar="PATH", help="Read messages from an archive, not from the database."),
        option("--plot", type=path, metavar="FILE.png", help="Also draw a picture. Needs the extra plot."),
        as_json,
        on_spark,
    )(command)


@click.group(no_args_is_help=True)
def report() -> None:
    """Look at the log with Spark.

    Needs the extra: pip install 'outbox-log[spark]'. Spark runs on this machine, unless --master or --remote says
    otherwise. Messages are read from the database, or from an archive of `outbox extract`.
    """


@report.command()
@reported
def delivery(*, work: Work, output: Output) -> None:
    """Show how many messages were written, are parked, and are not settled yet."""
    from outbox.spark.reports import delivery as frames
    from outbox.store.operations.status import statuses

    with work.begun() as (log, channel):
        now, found = statuses(channel)
        per_hour = _rows(frames.messages_per_hour(log.messages(frames.PER_HOUR_COLUMNS)))
        parked = log.table("parked", frames.PARKED_COLUMNS)
        by_age, dead = _rows(frames.parked_by_age(parked, now)), _rows(frames.dead_letters(parked))
    backlog: list[dict[str, Any]] = [
        {"subscription": each.name, "messages": each.backlog, "estimate": each.backlog_is_estimate,
         "lag_seconds": each.lag_seconds}
        for each in found
    ]  # fmt: skip
    if output.plot is not None:
        from outbox.spark.reports import plots

        plots.delivery(
            output.plot,
            per_hour=per_hour,
            parked=by_age,
            backlog={row["subscription"]: row["messages"] for row in backlog},
        )
    output.show(
        Table("per_hour", "Messages written", per_hour, ("hour", "topic", "messages")),
        Table("backlog", "Not settled yet", backlog, ("subscription", "messages", "estimate", "lag_seconds")),
        Table("parked", "Parked", by_age, ("subscription", "state", "age", "messages", "oldest")),
        Table("dead", "Dead letters", dead, ("subscription", "topic", "letters", "oldest", "newest", "error")),
        at=now,
    )


@report.command()
@reported
@option("--limit", type=click.IntRange(1), default=100, help="Show at most so many contradictions.")
def transactions(*, work: Work, output: Output, limit: int) -> None:
    """Show the outcome of half messages, and contradictions.

    Half messages are committed, rolled back, open, or parked: given up, until a person decides. A verdict without its
    effect, or an effect without a verdict, is a contradiction; with contradictions the exit code is 1. Messages that
    may have been purged prove nothing by their absence; UNPROVEN counts these cases.
    """
    from outbox.spark.reports import reconciliation as frames

    with work.begun() as (log, channel):
        reconciled = _reconciled(log, channel).cache()
        counts = _rows(frames.states(reconciled))
        problems = frames.contradictions(reconciled)
        if work.archive is None and sum(row["contradictions"] for row in counts):
            # Read again: a transaction that was decided during the first reading only looks like a contradiction.
            problems = frames.unless_healed(problems, _reconciled(log, channel)).cache()
            counts = _with_problems(counts, problems)
        number, shown = problems.count(), _rows(problems.limit(limit))
    if output.plot is not None:
        from outbox.spark.reports import plots

        plots.transactions(output.plot, counts)
    numbers = ("committed", "rolled_back", "open", "parked", "contradictions", "unproven")
    output.show(
        Table(
            "states", "Half messages", counts, ("producer_group", "topic", *numbers[:4], "oldest_open", *numbers[4:])
        ),
        Table(
            "contradictions",
            "Contradictions",
            shown,
            ("id", "message_id", "transaction_id", "producer_group", "topic", "state", "problem"),
        ),
        more=number > len(shown),
    )
    _end(number, len(shown))


@report.command()
@reported
@option("--header", metavar="NAME", help="The header with the version.")
@option("--json-path", metavar="PATH", help="The place of the version in the body: $.version.")
@option("--topics", type=NAMES, help="Only messages of the named topics.")
@option("--limit", type=click.IntRange(1), default=100, help="Show at most so many messages.")
def order(
    *, work: Work, output: Output, header: str | None, json_path: str | None, topics: tuple[str, ...] | None, limit: int
) -> None:
    """Show keys with versions that do not rise from message to message.

    In an archive readers get the messages by window, then by id; the report takes the same order. In the database the
    order is by id: the order of commits where the writers of a key wait for each other. With such keys the exit code
    is 1.
    """
    from outbox.spark.reports import order as frames

    if (header is None) == (json_path is None):
        raise click.UsageError("say where the version is: by either --header NAME or --json-path PATH")
    with work.begun() as (log, _):
        version = frames.version_in_header(header) if header else frames.version_in_body(json_path or "")
        by_window = work.archive is not None
        messages = log.windows(topics) if by_window else log.messages(frames.COLUMNS, topics=topics)
        audited = frames.versions(messages, version).cache()
        summary = _rows(frames.summary(audited))
        number = sum(row["fell"] + row["repeated"] for row in summary)
        found = _rows(frames.breaks(audited).limit(limit))
        drawn = [] if output.plot is None else _some(frames.breaks(audited), _MOST_POINTS)
        by = frames.order_of(messages)
    if output.plot is not None:
        from outbox.spark.reports import plots

        plots.order(output.plot, summary=summary, breaks=drawn)
    numbers = ("keys", "messages", "without_version", "unreadable", "fell", "repeated", "broken_keys")
    output.show(
        Table("summary", f"Versions of keys, in the order of {', '.join(by)}", summary, ("topic", *numbers)),
        Table(
            "breaks",
            "Messages whose version does not rise",
            found,
            (*by, "topic", "key", "created_at", "previous", "version", "problem"),
        ),
        more=number > len(found),
        order=by,
    )
    _end(number, len(found))


def _reconciled(log: Log, channel: Channel) -> DataFrame:
    from outbox.spark.manifest import Archive
    from outbox.spark.reports import reconciliation as frames
    from outbox.store.operations.purge import purged_id

    ends = None if log.archive is None else Archive(log.archive).last()
    return frames.reconcile(
        log.messages(frames.MESSAGE_COLUMNS, halves=True),
        log.table("op", frames.OP_COLUMNS),
        log.table("parked", frames.PARKED_COLUMNS),
        purged_id=purged_id(channel) if log.archive is None else 0,
        decided_before=None if ends is None else ends.captured_at - _BEFORE_THE_END,
        topics=None if ends is None else ends.topics,
    )


def _with_problems(counts: Sequence[Row], problems: DataFrame) -> list[Row]:
    """Return the counts with the remaining contradictions."""
    grouped = problems.groupBy("producer_group", "topic").count().collect()
    found = {(row["producer_group"], row["topic"]): row["count"] for row in grouped}
    return [{**row, "contradictions": found.get((row["producer_group"], row["topic"]), 0)} for row in counts]


def _some(frame: DataFrame, most: int) -> list[Row]:
    """Return at most so many rows, chosen at random: a picture shows no more."""
    from pyspark.sql import functions as sf

    return _rows(frame.orderBy(sf.rand(1)).limit(most))


def _rows(frame: DataFrame) -> list[Row]:
    rows: list[Row] = frame.toArrow().to_pylist()
    return rows


def _shown(value: object) -> object:
    if isinstance(value, datetime):
        return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]}…"
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _end(number: int, shown: int) -> None:
    """Tell how many findings were left out, and end with exit code 1 if there are findings."""
    if number > shown:
        say(f"{shown} of {number} are shown; raise --limit to see more")
    if number:
        click.get_current_context().exit(1)
