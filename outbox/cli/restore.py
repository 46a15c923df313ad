"""`outbox restore`: a log copied to another server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from outbox.cli.options import Target, about_a_database, as_json, by_whom, confirmed, option
from outbox.cli.output import counted, tell

if TYPE_CHECKING:
    from outbox.store.database import Channel
    from outbox.store.operations.restore import Again


@click.command()
@about_a_database
@option("--accept", is_flag=True, help="The ids go on as before (pg_upgrade): keep all positions.")
@option("--force", is_flag=True, help="Restore also a log that was not copied.")
@option("--dry-run", is_flag=True, help="Only tell how many messages would be sent again.")
@option("--yes", is_flag=True, help="Do not ask.")
@by_whom
@as_json
def restore(*, target: Target, accept: bool, force: bool, dry_run: bool, yes: bool, by: str | None, json: bool) -> None:
    """Bring a copied log in line with the ids of the new server.

    Stop all workers before. A subscription that was ahead of another sends messages again; no subscription misses a
    message. A log without a copy is left alone. An SQLite file may be copied freely, because the file has its own ids.
    """
    from outbox.model.limits import require_notes

    require_notes(by=by)
    with target.open_outbox() as channel:
        action, told, again = _restored(channel, accept=accept, force=force, dry_run=dry_run, yes=yes, by=by)
    numbers = {each.subscription: each.messages for each in again}
    document = {"action": action, "dry_run": dry_run, "read_again": sum(numbers.values()), "again": numbers}
    tell(told, document, json=json)


def _restored(
    channel: Channel, *, accept: bool, force: bool, dry_run: bool, yes: bool, by: str | None
) -> tuple[str, str, Sequence[Again]]:
    """Restore; return `restored`, `accepted` or `none`, the same in words, and the messages that are sent again."""
    from outbox.store import identity
    from outbox.store.operations import restore as store

    if channel.database.dialect.home.restore is None:
        return "none", "there is nothing to restore: the ids of an SQLite file are its own", ()
    if not force and not identity.is_copy(channel):
        return (
            "none",
            "this log was not copied, nothing to restore; all messages were written here, in this database",
            (),
        )
    if accept:
        store.require_acceptable(channel)
        if not dry_run:
            confirmed("keep all positions as they are, on a server that goes on with the same ids?", yes=yes)
            store.accept(channel, by=by)
        return "accepted", f"the positions {'would be' if dry_run else 'are'} accepted as they are", ()
    if dry_run or not yes:
        expected = store.rehearse(channel)
        if dry_run:
            return "restored", f"nothing is changed; a restore: {_in_words(expected)}", expected
        confirmed(f"give every message of the log an id of this server ({_in_words(expected)})?", yes=yes)
    again = store.restore(channel, by=by)
    return "restored", f"the log is restored: {_in_words(again)}", again


def _in_words(again: Sequence[Again]) -> str:
    reads = [f"{each.subscription} reads {counted(each.messages, 'message')} again" for each in again if each.messages]
    return ", ".join(reads) or "no message is read again"
