"""`outbox erase`: deletes the messages of a person."""

from __future__ import annotations

from dataclasses import asdict
from uuid import UUID

import click

from outbox.cli.options import KEY, Target, about_a_database, as_json, by_whom, option
from outbox.cli.output import counted, say, show_json

_STAY = ("stays", "stay")


@click.command()
@about_a_database
@option("--key", "keys", type=KEY, multiple=True, help="Messages with this key. May be given several times.")
@option("--message-id", "message_ids", type=click.UUID, multiple=True, help="This message. May be given several times.")
@option("--dry-run", is_flag=True, help="Count the messages, and delete nothing.")
@by_whom
@as_json
def erase(
    *, target: Target, keys: tuple[str, ...], message_ids: tuple[UUID, ...], dry_run: bool, by: str | None, json: bool
) -> None:
    """Delete the messages of a person, by key or by message id.

    Messages go from the log as soon as every subscription has passed them, whatever their age. Dead letters are
    discarded. A message that is still to be delivered stays: the command says for whom, and ends with exit code 1. Run
    the command again after the delivery.

    Copies at destinations, in archives of `outbox extract`, and in backups stay.
    """
    from outbox.admin.admin import Admin

    if not keys and not message_ids:
        raise click.UsageError("say whose messages: --key KEY or --message-id UUID")
    with target.open_outbox() as channel:
        done = Admin(channel).erase(keys=keys, message_ids=message_ids, by=by, rehearsal=dry_run)
    if json:
        show_json({**asdict(done), "dry_run": dry_run})
    else:
        letters = f" and {counted(done.dead_letters, 'dead letter')}" if done.dead_letters else ""
        say(f"{counted(done.rows, 'message')}{letters} {'would go' if dry_run else 'deleted'}")
        look, pending = target.commands.line("status"), target.commands.line("half", "list")
        for name, number in done.waiting.items():
            say(f"{counted(number, 'message', _STAY)} with {name} for now; see: {look}; then run this again")
        if done.undecided:
            say(f"{counted(done.undecided, 'half message', _STAY)} until there is a verdict; see: {pending}")
        if done.repeated:
            of_them = counted(done.repeated, "message", _STAY)
            say(f"{of_them} because an open transaction repeats a dedup key; run this again after its end")
    if done.waiting or done.undecided or done.repeated:
        click.get_current_context().exit(1)
