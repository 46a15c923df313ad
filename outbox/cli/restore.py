"""`outbox restore`: a log that was copied to another server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from outbox.cli.decisions import tell
from outbox.cli.options import Target, about_a_database, as_json, confirmed, option
from outbox.cli.output import counted

if TYPE_CHECKING:
    from outbox.store.database import Channel
    from outbox.store.operations.restore import Again


@click.command()
@about_a_database
@option("--accept", is_flag=True, help="The ids go on as they were (pg_upgrade): keep all positions.")
@option("--force", is_flag=True, help="Restore also a log that was not copied.")
@option("--dry-run", is_flag=True, help="Only tell how many messages would be sent again.")
@option("--yes", is_flag=True, help="Do not ask.")
@as_json
def restore(*, target: Target, accept: bool, force: bool, dry_run: bool, yes: bool, json: bool) -> None:
    """Bring a log that was copied to another server in line with the ids that this one draws.

    Stop all workers before. A subscription that was ahead of another one sends messages again; none misses one. A log
    that was not copied is left as it is. An SQLite file may be copied freely: its ids are its own.
    """
    with target.open_outbox() as channel:
        tell(_restored(channel, accept=accept, force=force, dry_run=dry_run, yes=yes), json=json)


def _restored(channel: Channel, *, accept: bool, force: bool, dry_run: bool, yes: bool) -> _Restored:
    from outbox.store import identity
    from outbox.store.operations import restore as store

    if channel.database.dialect.home.restore is None:
        return _Restored("none", "there is nothing to restore: the ids of an SQLite file are its own", dry_run)
    if not force and not identity.is_copy(channel):
        text = "this log was not copied, nothing to restore; it was written on this server, in this database"
        return _Restored("none", text, dry_run)
    if accept:
        if not dry_run:
            confirmed("keep all positions as they are, on a server that goes on with the same ids?", yes=yes)
            store.accept(channel)
        return _Restored("accepted", f"the positions {'would be' if dry_run else 'are'} accepted as they are", dry_run)
    if dry_run or not yes:
        expected = store.rehearse(channel)
        if dry_run:
            return _Restored("restored", f"nothing is changed; a restore: {_in_words(expected)}", dry_run, expected)
        confirmed(f"give every message of the log an id of this server ({_in_words(expected)})?", yes=yes)
    again = store.restore(channel)
    return _Restored("restored", f"the log is restored: {_in_words(again)}", dry_run, again)


def _in_words(again: Sequence[Again]) -> str:
    sends = [f"{each.subscription} sends {counted(each.messages, 'message')} again" for each in again if each.messages]
    return ", ".join(sends) or "no message is sent again"


@dataclass(frozen=True, slots=True)
class _Restored:
    """The result: `restored`, `accepted` or `none`; the same in words; and what is sent again, by subscription."""

    action: str
    text: str
    dry_run: bool
    again: Sequence[Again] = ()

    def describe(self) -> str:
        return self.text

    def as_json(self) -> dict[str, object]:
        return {
            "action": self.action,
            "dry_run": self.dry_run,
            "read_again": sum(each.messages for each in self.again),
            "again": {each.subscription: each.messages for each in self.again},
        }
