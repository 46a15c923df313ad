"""`outbox consumers`: the consumers of the log, and the instances of broadcast consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from outbox.cli.groups import Group
from outbox.cli.options import Target, about_a_database, as_json
from outbox.cli.output import show_json
from outbox.cli.standings import show_standings, standing_as_json
from outbox.cli.subscriptions import drop, reset

if TYPE_CHECKING:
    from outbox.model.subscription import Subscription
    from outbox.store.database import Channel

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
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        known = Subscriptions(channel).all()
        names = {each.name for each in known if each.kind in _KINDS}
        _show(channel, [each for each in known if {each.name, each.follows} & names], json=json)


@consumers.command()
@about_a_database
@click.argument("name")
@as_json
def show(*, target: Target, name: str, json: bool) -> None:
    """Show a consumer, or all instances of a broadcast consumer, with each partition."""
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with target.open_outbox() as channel:
        meant = Subscriptions(channel).get_all(name)
        if meant[0].kind not in _KINDS:
            raise click.UsageError(f"{name} is no consumer but of the kind {meant[0].kind}; see outbox status")
        _show(channel, meant, least=1, json=json)


consumers.add_command(reset)
consumers.add_command(drop)


def _show(channel: Channel, meant: Sequence[Subscription], *, least: int = 2, json: bool) -> None:
    """Show the status of subscriptions, with partitions where there are at least so many."""
    from outbox.store.operations.status import standings

    now, found = standings(channel, meant)
    if json:
        show_json({"at": now, "consumers": [standing_as_json(each) for each in found]})
    else:
        show_standings(found, least=least)
