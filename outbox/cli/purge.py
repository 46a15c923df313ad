"""`outbox purge`: old messages that nobody needs any more."""

from __future__ import annotations

from datetime import timedelta

import click

from outbox.cli.options import DURATION, Target, about_a_database, as_json, option
from outbox.cli.output import counted, say, show_json


@click.command()
@about_a_database
@option("--older-than", type=DURATION, required=True, help="How long messages are kept, by the database's clock: 7d.")
@option("--dry-run", is_flag=True, help="Count what would go, and delete nothing.")
@as_json
def purge(*, target: Target, older_than: timedelta, dry_run: bool, json: bool) -> None:
    """Delete messages that are older than this, and that every subscription is past.

    In small batches; readers and writers go on. Messages that were set aside are copies, and stay.
    """
    from outbox.store.purge import Purge

    with target.opened() as (database, channel):
        work = Purge(database)
        done = work.rehearse(channel, older_than) if dry_run else work.run(channel, older_than)
    if json:
        show_json({"rows": done.rows, "before": done.before, "held_by": done.held_by, "dry_run": dry_run})
        return
    moment = f"{done.before:%Y-%m-%d %H:%M:%S %Z}"
    say(f"{counted(done.rows, 'message')} from before {moment} {'would go' if dry_run else 'deleted'}")
    for name in done.held_by:
        say(f"older ones stay for {name}, which has not passed them; see: outbox status")
