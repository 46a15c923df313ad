"""`outbox relay`: the worker that sends messages to a destination."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.garbage_collector import collect_rarely
from outbox.cli.options import (
    DURATION,
    NAMES,
    START,
    Target,
    about_databases,
    as_given,
    by_routes,
    option,
    rewritten,
    to_a_destination,
)

if TYPE_CHECKING:
    from outbox.relay.routes import Route


@click.command()
@about_databases
@to_a_destination
@by_routes
@option("--topics", type=NAMES, help="Only these topics; 'orders.*' is a pattern, '!orders.*' an exception.")
@rewritten
@option("--name", default="relay", help="The subscription: one name, one selection, one destination.")
@option(
    "--from",
    "start",
    type=START,
    default="earliest",
    envvar="OUTBOX_RELAY_FROM",
    help="Where a new subscription begins.",
)
@option("--on-dead", type=click.Choice(["block", "continue"]), help="Whether a dead letter holds back its key. [block]")
@option("--once", is_flag=True, help="Send one batch, then end.")
@option("--until-empty", is_flag=True, help="Send what is there, then end.")
@option(
    "--give-up-after",
    type=DURATION,
    default="60s",
    help="With --once and --until-empty: end with exit code 4 when nothing could be sent for so long.",
)
@option("--batch-size", type=click.IntRange(1, 100_000), default=1000, help="Most messages in a batch.")
@option("--batch-bytes", type=click.IntRange(1), default=8 * 1024 * 1024, help="Most bytes in a batch.")
@option("--lease", type=DURATION, default="10s", help="Time until another worker takes over from one that died.")
@option(
    "--deadline",
    type=DURATION,
    help="Time limit of one call of the destination. [default: the URL's timeout, or its own; else 5s]",
)
@option("--attempts", type=click.IntRange(1), default=10, help="Failures until a message becomes a dead letter.")
def relay(
    *,
    targets: tuple[Target, ...],
    to: str | None,
    route: tuple[str, ...],
    config: Path | None,
    topics: tuple[str, ...] | None,
    prefix: str | None,
    rename: tuple[str, ...],
    envelope: str,
    name: str,
    start: str | datetime,
    on_dead: str | None,
    once: bool,
    until_empty: bool,
    give_up_after: timedelta,
    **pace: Any,
) -> None:
    """Send the messages of the log to a destination.

    Runs until SIGTERM or SIGINT, which let it finish what is under way; a second one ends it at once. Several
    processes may run under one name: one works, the others stand by.

    With several databases or schemas there is a relay for each schema of each database; one that is down delays no
    other. With --once and --until-empty the exit code is 4 when one of them gave up.

    With --route or --config there is a relay for each route, with a subscription of its own: NAME for '*', NAME:TOPIC
    for the others.
    """
    if once and until_empty:
        raise click.UsageError("--once and --until-empty exclude each other")
    _require_name(name)
    _require_pace(pace["lease"], pace["deadline"])
    ends = once or until_empty
    options = {"name": name, "start": start, "on_dead": on_dead, **pace}
    routes = _routes(to, route, config, topics=topics, rewrites=prefix is not None or rename or envelope != "raw")
    if routes is None:
        from outbox.cli.routes import renamed

        options |= {"topics": topics, "prefix": prefix, "rename": renamed(rename), "envelope": envelope}
    if len(targets) == 1 and routes is None:
        from outbox.cli.relay_one import Relaying

        relaying = Relaying(targets[0], str(to), **options)
        collect_rarely()
        code = relaying.end_by_itself(once=once, patience=give_up_after) if ends else relaying.run()
    else:
        from outbox.cli.relay_several import RelayingSeveral

        several = RelayingSeveral(targets, str(to) if routes is None else routes, **options)
        collect_rarely()
        code = several.end_by_themselves(once=once, patience=give_up_after) if ends else several.run()
    click.get_current_context().exit(code)


def _routes(
    to: str | None, given: tuple[str, ...], config: Path | None, *, topics: tuple[str, ...] | None, rewrites: object
) -> dict[str, Route] | None:
    """Return the routes; None if there is one destination."""
    said = {"to": to, "route": given or None, "config": config}
    options = [as_given(name) for name, value in said.items() if value is not None]
    if len(options) > 1:
        raise click.UsageError(f"{' and '.join(options)} exclude each other; give one of them")
    if not options:
        raise click.UsageError(
            "no destination: give --to URL (nats://host:4222, stdout:) or --to-file PATH, or --route or --config"
        )
    if to is not None:
        return None
    if topics is not None:
        raise click.UsageError(f"{options[0]} and --topics exclude each other: each route has its own topics")
    if rewrites:
        raise click.UsageError(
            f"{options[0]} excludes --prefix, --rename and --envelope; write them into the table of a route (--config)"
        )
    from outbox.cli.routes import routes_of_file, routes_of_options

    return routes_of_options(given) if config is None else routes_of_file(config)


def _require_name(name: str) -> None:
    if not name or not name.isprintable():
        raise click.UsageError("--name must be one or more characters that can be printed")


def _require_pace(lease: timedelta, deadline: timedelta | None) -> None:
    if lease < timedelta(seconds=1):
        raise click.UsageError("--lease must be at least 1s, or it would be lost before it is renewed")
    if deadline is not None and deadline <= timedelta(0):
        raise click.UsageError("--deadline must be greater than 0")
