"""`outbox restore`: a log that was copied to another server."""

from __future__ import annotations

from dataclasses import dataclass

import click

from outbox.cli.decisions import tell
from outbox.cli.options import Target, about_a_database, as_json, confirmed, option
from outbox.cli.output import counted


@click.command()
@about_a_database
@option("--accept", is_flag=True, help="The ids go on as they were (pg_upgrade): keep all positions.")
@option("--yes", is_flag=True, help="Do not ask.")
@as_json
def restore(*, target: Target, accept: bool, yes: bool, json: bool) -> None:
    """Bring a log that was copied to another server in line with the ids that this one draws.

    Stop all workers before. Subscriptions that stood far apart may see messages again; none misses one. An SQLite
    file may be copied freely: its ids are its own.
    """
    from outbox.store.operations import restore as store

    with target.open_outbox() as channel:
        if not channel.database.dialect.transaction_ids:
            done = _Restored("none", "there is nothing to restore: the ids of an SQLite file are its own")
        elif accept:
            confirmed("keep all positions as they are, on a server that goes on with the same ids?", yes=yes)
            store.accept(channel)
            done = _Restored("accepted", "the positions are accepted as they are")
        else:
            confirmed("give every message of the log an id of this server?", yes=yes)
            again = store.restore(channel)
            done = _Restored("restored", f"{counted(again, 'message')} will be read again by somebody", again)
    tell(done, json=json)


@dataclass(frozen=True, slots=True)
class _Restored:
    """The result: `restored`, `accepted` or `none`; the same in words; and how many messages are read `again`."""

    action: str
    text: str
    again: int = 0

    def describe(self) -> str:
        return self.text

    def as_json(self) -> dict[str, object]:
        return {"action": self.action, "read_again": self.again}
