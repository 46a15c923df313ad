"""`outbox purge`: deletes old messages."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outbox.cli.options import DURATION, Target, about_a_database, as_json, by_whom, option
from outbox.cli.output import age, counted, moment, say, show_json
from outbox.cli.spark import Cluster, on_spark, require_drawable, session, source_options

if TYPE_CHECKING:
    from outbox.spark.reports.archive import Comparison, Range
    from outbox.store.database import Channel

_PATH = click.Path(path_type=Path)


@click.command()
@about_a_database
@option("--older-than", type=DURATION, required=True, help="How long messages are kept, by the database's clock: 7d.")
@option("--keep-dead", type=DURATION, help="Discard what has been a dead letter for longer: 90d. Else all stay.")
@option("--dry-run", is_flag=True, help="Count the messages, and delete nothing.")
@option("--archive", type=_PATH, metavar="PATH", help="Only messages that are, proven by Spark, in this archive.")
@option("--plot", type=_PATH, metavar="FILE.png", help="With --archive: draw the comparison. Needs the extra plot.")
@on_spark
@by_whom
@as_json
def purge(
    *,
    target: Target,
    older_than: timedelta,
    keep_dead: timedelta | None,
    dry_run: bool,
    archive: Path | None,
    plot: Path | None,
    cluster: Cluster,
    by: str | None,
    json: bool,
) -> None:
    """Delete old messages that every subscription has passed.

    Deletes in small batches, so readers and writers go on. Parked messages are copies, and stay. With --keep-dead, old
    dead letters are discarded, as by `outbox parked discard`: messages behind them, of the same keys, go on.

    With --archive PATH, an archive of `outbox extract`, messages are first compared with the copies there, by number
    and checksum for each range of ids. If a range differs, nothing is deleted, and the first differing range is named.
    Messages behind the end of the archive stay.
    """
    from outbox.admin.admin import Admin
    from outbox.model.limits import require_notes

    require_notes(by=by)
    if archive is None and plot is not None:
        raise click.UsageError("--plot shows the comparison with an archive; name the archive by --archive PATH")
    require_drawable(plot)
    with target.open_outbox() as channel:
        if archive is None:
            done = Admin(channel).purge(older_than, keep_dead=keep_dead, by=by, rehearsal=dry_run)
            ranges: tuple[Range, ...] = ()
        else:
            from outbox.admin.decisions import purge_dead
            from outbox.spark.reports.archive import purge_archived
            from outbox.store.subscriptions.decisions import note

            compared = _compared(target, channel, archive, older_than, cluster)
            if plot is not None:
                from outbox.spark.reports import plots

                plots.archive(plot, [{**asdict(each), "same": each.same} for each in compared.ranges])
            if not dry_run:
                with channel.transaction():
                    chosen = {"older_than": older_than, "keep_dead": keep_dead, "archive": str(archive)}
                    note(channel, "purge", by=by, choice=chosen)
            done, ranges = purge_archived(channel, older_than, compared, rehearsal=dry_run), compared.ranges
            dead, behind = purge_dead(channel, keep_dead, by=by, rehearsal=dry_run)
            done = replace(done, dead_letters=dead, behind=behind)
    if json:
        proven = {} if archive is None else {"ranges": ranges}
        show_json({**asdict(done), "dry_run": dry_run, **proven})
        return
    if ranges:
        messages = counted(sum(each.rows for each in ranges), "message")
        say(f"compared {messages} in {counted(len(ranges), 'range')} of ids: {archive} has the same")
    say(f"{counted(done.rows, 'message')} from before {moment(done.before)} {'would go' if dry_run else 'deleted'}")
    if keep_dead is not None:
        letters = f"{counted(done.dead_letters, 'dead letter')} of more than {age(keep_dead.total_seconds())}"
        goes = ("would go", "would go") if dry_run else ("goes", "go")
        on = f"{counted(done.behind, 'message', goes)} on behind these"
        say(f"{letters} {'would be discarded' if dry_run else 'discarded'}{f'; {on}' if done.behind else ''}")
    for name in done.held_by:
        say(f"older messages stay for {name}, which has not passed them; see: {target.commands.line('status')}")


def _compared(target: Target, channel: Channel, archive: Path, older_than: timedelta, cluster: Cluster) -> Comparison:
    """Compare the messages with the copies in an archive."""
    from outbox.spark import register
    from outbox.spark.reports.archive import Comparison, candidates, compare_candidates

    found = candidates(channel, archive, older_than)
    if isinstance(found, Comparison):
        return found
    with session(cluster=cluster) as spark:
        register(spark)
        return compare_candidates(spark, found, source=source_options(target, local=cluster.is_local))
