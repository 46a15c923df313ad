"""`outbox restore`: a log that was copied to another server."""

from __future__ import annotations

import click

from outbox.cli.options import Target, about_a_database, confirmed, option
from outbox.cli.output import say


@click.command()
@about_a_database
@option("--accept", is_flag=True, help="The ids go on as they were (pg_upgrade): keep all positions.")
@option("--yes", is_flag=True, help="Do not ask.")
def restore(*, target: Target, accept: bool, yes: bool) -> None:
    """Bring a log that was copied to another server in line with the ids that this one draws.

    With all workers stopped. Subscriptions that stood far apart may see messages again; none misses one. An SQLite
    file may be copied freely: its ids are its own.
    """
    from outbox.store import restore as store

    with target.opened() as (database, channel):
        if database.dialect.name == "sqlite":
            say("there is nothing to restore: the ids of an SQLite file are its own")
        elif accept:
            confirmed("keep all positions as they are, on a server that goes on with the same ids?", yes=yes)
            store.accept(database, channel)
            say("the positions are accepted as they are")
        else:
            confirmed("give every message of the log an id of this server?", yes=yes)
            say(f"{store.restore(database, channel)} messages will be read again by somebody")
