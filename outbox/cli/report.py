"""`outbox report`: what Spark finds out about a log, as tables, JSON, CSV files and pictures."""

from __future__ import annotations

import csv
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
from outbox.cli.spark import on_spark, require_drawable, session, source_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from outbox.store.database import Channel

F = TypeVar("F", bound=Callable[..., Any])
Row = Mapping[str, Any]

_SHOWN, _MOST_POINTS = 80, 20_000
#: Verdicts within this time before the end of an archive may belong to messages after its end.
_BEFORE_THE_END = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a report: its name and title, its rows, and the columns whose values are numbers."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    numbers: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output that is wanted of a report: JSON or text, a folder for CSV files, a file for a picture."""

    json: bool
    csv: Path | None
    plot: Path | None

    def show(self, tables: Sequence[Table], *, more: bool = False, **extra: object) -> None:
        """Show the tables of a report. `more`: one of them was cut. `extra`: further fields of the JSON."""
        if self.csv is not None:
            for table in tables:
                _write_csv(self.csv, table)
        if self.json:
            show_json({**extra, **{table.name: table.rows for table in tables}}, more=more)
            return
        for table in tables:
            click.echo(f"{table.title}:")
            if table.rows:
                headers = [name.replace("_", " ").upper() for name in table.columns]
                rows = [[_shown(row[name]) for name in table.columns] for row in table.rows]
                show_table(headers, rows, numbers=[name.replace("_", " ").upper() for name in table.numbers])
            else:
                click.echo("none")
            click.echo()


@dataclass(frozen=True, slots=True)
class Work:
    """The database and the archive that a report is about, and where Spark runs for it."""

    target: Target
    archive: Path | None
    master: str | None
    remote: str | None

    @contextmanager
    def begun(self) -> Iterator[tuple[Log, Channel]]:
        """Look whether the archive is there, open the database, and start Spark last, because that takes a while."""
        from outbox.spark import register
        from outbox.spark.manifest import Archive

        if self.archive is not None:
            Archive(self.archive).newest()
        with self.target.open_outbox() as channel:
            source = source_options(self.target, local=self.master is None and self.remote is None)
            with session(master=self.master, remote=self.remote) as spark:
                register(spark)
                yield Log(spark, source, self.archive), channel


@dataclass(frozen=True, slots=True)
class Log:
    """The data that a report reads: the tables of a database, and its messages there or in an archive."""

    spark: SparkSession
    source: Mapping[str, str]
    archive: Path | None

    def messages(self, columns: str, *, halves: bool = False, topics: Sequence[str] | None = None) -> DataFrame:
        """Return the messages with these columns, and perhaps others."""
        if self.archive is not None:
            from outbox.spark import archived

            return archived(self.spark, self.archive, topics=topics)
        options = {} if topics is None else {"topics": ",".join(topics)}
        return self._read({**options, "halves": str(halves).lower()}, columns)

    def windows(self, topics: Sequence[str] | None) -> DataFrame:
        """Return the messages of the archive, with the numbers of their windows."""
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
    """Give a report the options that all of them have."""

    @functools.wraps(function)
    def command(
        *, target: Target, json: bool, csv: Path | None, plot: Path | None, archive: Path | None,
        master: str | None, remote: str | None, **rest: Any,
    ) -> Any:  # fmt: skip
        output = Output(json=json, csv=csv, plot=plot)
        require_drawable(plot)
        if csv is not None and csv.exists() and not csv.is_dir():
            raise click.UsageError(f"--csv {csv}: that is a file; name a folder, into which each table is written")
        return function(work=Work(target, archive, master, remote), output=output, **rest)

    path = click.Path(path_type=Path)
    return together(  # type: ignore[return-value]
        about_a_database,
        option("--archive", type=path, metavar="PATH", help="Read messages from this archive, not from the database."),
        option("--plot", type=path, metavar="FILE.png", help="Also draw a picture. Needs the extra plot."),
        option("--csv", type=path, metavar="FOLDER", help="Also write each table to a file there."),
        as_json,
        on_spark,
    )(command)


@click.group(no_args_is_help=True)
def report() -> None:
    """Look at the log with Spark.

    Needs the extra: pip install 'outbox-log[spark]'. Spark runs on this machine, unless --master or --remote says
    otherwise. Messages are read from the database, or from an archive that `outbox extract` has written.
    """


@report.command()
@reported
def delivery(*, work: Work, output: Output) -> None:
    """Show how many messages were written, are parked, and are not settled yet."""
    from outbox.spark.reports import delivery as frames
    from outbox.store.operations.status import standings

    with work.begun() as (log, channel):
        now, found = standings(channel)
        per_hour = _rows(frames.messages_per_hour(log.messages(frames.PER_HOUR_COLUMNS)))
        parked = log.table("parked", frames.PARKED_COLUMNS)
        by_age, dead = _rows(frames.parked_by_age(parked, now)), _rows(frames.dead_letters(parked))
    backlog: list[dict[str, Any]] = [
        {"subscription": each.subscription.name, "messages": each.backlog.number, "estimate": each.backlog.about,
         "lag_seconds": round(each.lag, 3)}
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
        [
            Table(
                name="per_hour", title="Messages written", rows=per_hour,
                columns=("hour", "topic", "messages"), numbers=("messages",),
            ),
            Table(
                name="backlog", title="Not settled yet", rows=backlog,
                columns=("subscription", "messages", "estimate", "lag_seconds"), numbers=("messages", "lag_seconds"),
            ),
            Table(
                name="parked", title="Parked", rows=by_age,
                columns=("subscription", "state", "age", "messages", "oldest"), numbers=("messages",),
            ),
            Table(
                name="dead", title="Dead letters", rows=dead,
                columns=("subscription", "topic", "letters", "oldest", "newest", "error"), numbers=("letters",),
            ),
        ],
        at=now,
    )  # fmt: skip


@report.command()
@reported
@option("--limit", type=click.IntRange(1), default=100, help="Show at most so many contradictions.")
def transactions(*, work: Work, output: Output, limit: int) -> None:
    """Show what became of half messages, and what contradicts that.

    Half messages are committed, rolled back, open, or parked: given up, they wait for a person. A verdict that has not
    had its effect, or an effect without its verdict, is a contradiction, and ends this with exit code 1. Nothing is
    concluded from the absence of what may have been purged; UNPROVEN counts such cases.
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
        [
            Table(
                name="states", title="Half messages", rows=counts, numbers=numbers,
                columns=("producer_group", "topic", *numbers[:4], "oldest_open", *numbers[4:]),
            ),
            Table(
                name="contradictions", title="Contradictions", rows=shown, numbers=("id",),
                columns=("id", "message_id", "transaction_id", "producer_group", "topic", "state", "problem"),
            ),
        ],
        more=number > len(shown),
    )  # fmt: skip
    _end(number, len(shown))


@report.command()
@reported
@option("--header", metavar="NAME", help="The header that holds the version.")
@option("--json-path", metavar="PATH", help="Where in the body the version is: $.version.")
@option("--topics", type=NAMES, help="Only of these topics.")
@option("--limit", type=click.IntRange(1), default=100, help="Show at most so many messages.")
def order(
    *, work: Work, output: Output, header: str | None, json_path: str | None, topics: tuple[str, ...] | None, limit: int
) -> None:
    """Show keys whose version does not rise from message to message.

    Of an archive the order is that in which its readers get the messages: by window, then by id. Of the database it is
    that of the ids, which is the order of commits where the writers of a key wait for one another.
    """
    from outbox.spark.reports import order as frames

    if (header is None) == (json_path is None):
        raise click.UsageError("say where the version is: by --header NAME or --json-path PATH, one of the two")
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
        [
            Table(
                name="summary", title=f"Versions of keys, in the order of {', '.join(by)}", rows=summary,
                columns=("topic", *numbers), numbers=numbers,
            ),
            Table(
                name="breaks", title="Messages whose version does not rise", rows=found,
                columns=(*by, "topic", "key", "created_at", "previous", "version", "problem"),
                numbers=(*by, "previous", "version"),
            ),
        ],
        more=number > len(found),
        order=by,
    )  # fmt: skip
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
    """Return the counts with the contradictions that are left."""
    grouped = problems.groupBy("producer_group", "topic").count().collect()
    found = {(row["producer_group"], row["topic"]): row["count"] for row in grouped}
    return [{**row, "contradictions": found.get((row["producer_group"], row["topic"]), 0)} for row in counts]


def _some(frame: DataFrame, most: int) -> list[Row]:
    """Return at most so many rows, chosen at random, because a picture shows no more."""
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


def _write_csv(folder: Path, table: Table) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{table.name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table.columns)
        for row in table.rows:
            values = (row[name] for name in table.columns)
            writer.writerow([each.isoformat() if isinstance(each, datetime) else each for each in values])


def _end(number: int, shown: int) -> None:
    """Say how many of the findings were left out, and end with exit code 1 if there are any."""
    if number > shown:
        say(f"{shown} of {number} are shown; raise --limit to see more")
    if number:
        click.get_current_context().exit(1)
