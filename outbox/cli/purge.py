"""`outbox purge`: deletes old messages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outbox.cli.options import DURATION, Target, about_a_database, as_json, option
from outbox.cli.output import counted, moment, say, show_json
from outbox.cli.spark import on_spark, require_drawable, session, source_options

if TYPE_CHECKING:
    from outbox.spark.reports.archive import Range
    from outbox.store.database import Channel
    from outbox.store.operations.purge import Purged

_PATH = click.Path(path_type=Path)


@click.command()
@about_a_database
@option("--older-than", type=DURATION, required=True, help="How long messages are kept, by the database's clock: 7d.")
@option("--dry-run", is_flag=True, help="Count the messages, and delete nothing.")
@option("--archive", type=_PATH, metavar="PATH", help="Only messages that are, proven by Spark, in this archive.")
@option("--plot", type=_PATH, metavar="FILE.png", help="With --archive: draw what was compared. Needs the extra plot.")
@on_spark
@as_json
def purge(
    *,
    target: Target,
    older_than: timedelta,
    dry_run: bool,
    archive: Path | None,
    plot: Path | None,
    master: str | None,
    remote: str | None,
    json: bool,
) -> None:
    """Delete old messages that every subscription has passed.

    Deletes in small batches, so readers and writers go on. Parked messages are copies, and stay.

    With --archive PATH, an archive of `outbox extract`, messages are first compared with the copies there, by number
    and checksum for each range of ids. If a range differs, nothing is deleted, and the first differing range is named.
    Messages behind the end of the archive stay.
    """
    from outbox.store.operations.purge import Purge

    if archive is None and plot is not None:
        raise click.UsageError("--plot shows the comparison with an archive; say which by --archive PATH")
    require_drawable(plot)
    with target.open_outbox() as channel:
        if archive is None:
            work = Purge(channel)
            done = work.rehearse(older_than) if dry_run else work.run(older_than)
            ranges: tuple[Range, ...] = ()
        else:
            job = _Archived(target, master, remote, archive, older_than, plot)
            done, ranges = job.purge(channel, dry_run=dry_run)
    if json:
        proven = {} if archive is None else {"ranges": [asdict(each) for each in ranges]}
        show_json({"rows": done.rows, "before": done.before, "held_by": done.held_by, "dry_run": dry_run, **proven})
        return
    if ranges:
        compared = counted(sum(each.rows for each in ranges), "message")
        say(f"compared {compared} in {counted(len(ranges), 'range')} of ids: {archive} has the same")
    say(f"{counted(done.rows, 'message')} from before {moment(done.before)} {'would go' if dry_run else 'deleted'}")
    for name in done.held_by:
        say(f"older ones stay for {name}, which has not passed them; see: outbox status")


@dataclass(frozen=True, slots=True)
class _Archived:
    """A purge of the messages that are in an archive."""

    target: Target
    master: str | None
    remote: str | None
    archive: Path
    older_than: timedelta
    plot: Path | None

    def purge(self, channel: Channel, *, dry_run: bool) -> tuple[Purged, tuple[Range, ...]]:
        """Compare the messages with their copies in the archive, then delete them."""
        from outbox.spark import register
        from outbox.spark.reports.archive import Comparison, candidates, compare_candidates, purge_archived

        found = candidates(channel, self.archive, self.older_than)
        if isinstance(found, Comparison):
            compared = found
        else:
            source = source_options(self.target, local=self.master is None and self.remote is None)
            with session(master=self.master, remote=self.remote) as spark:
                register(spark)
                compared = compare_candidates(spark, found, source=source)
        if self.plot is not None:
            from outbox.spark.reports import plots

            plots.archive(self.plot, [{**asdict(each), "same": each.same} for each in compared.ranges])
        done = purge_archived(channel, self.older_than, compared, rehearsal=dry_run)
        return done, compared.ranges
