"""`outbox consumers`: the consumers of the log, and the instances of broadcast consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from outbox.cli.groups import Group
from outbox.cli.options import Target, about_a_database, as_json
from outbox.cli.output import show_json
from outbox.cli.statuses import show_statuses
from outbox.cli.subscriptions import drop, reset

if TYPE_CHECKING:
    from outbox.model.status import Status

_KINDS = ("consumer", "broadcast")


@click.group(cls=Group, no_args_is_help=True)
def consumers() -> None:
    """List the consumers of the log, look at one, let it begin again, drop it."""


@consumers.command("list")
@about_a_database
@as_json
def list_(*, target: Target, json: bool) -> None:
    """List consumers, instances of broadcast consumers, and backfills: what waits, since when, who works on it.

    The columns are those of outbox status.
    """
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        found = Admin(channel).statuses()
    # Without a destination a backfill is that of a consumer.
    _show(
        [each for each in found if each.kind in _KINDS or (each.kind, each.destination) == ("backfill", None)],
        json=json,
    )


@consumers.command()
@about_a_database
@click.argument("name")
@as_json
def show(*, target: Target, name: str, json: bool) -> None:
    """Show a consumer, or all instances of a broadcast consumer, with each partition."""
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        found = Admin(channel).statuses(name)
    if found[0].kind not in _KINDS:
        look = target.commands.line("status")
        raise click.UsageError(f"{name} is no consumer but of the kind {found[0].kind}; see {look}")
    _show(found, least=1, json=json)


consumers.add_command(reset)
consumers.add_command(drop)


def _show(found: Sequence[Status], *, least: int = 2, json: bool) -> None:
    """Show the status of subscriptions, with partitions where there are at least so many."""
    if json:
        show_json({"consumers": found})
    else:
        show_statuses(found, least=least)
