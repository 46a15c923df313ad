"""`outbox relay`: the worker that sends messages to a destination."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from outbox.cli.config import current
from outbox.cli.options import (
    DURATION,
    NAMES,
    START,
    Target,
    about_databases,
    as_given,
    as_value,
    by_content,
    from_settings,
    option,
    to_a_destination,
)
from outbox.cli.probes import Probes, probed
from outbox.cli.secrets import no_password
from outbox.runtime.garbage import collect_rarely

if TYPE_CHECKING:
    from outbox.model.subscription import OnDead, Start

#: The batches under way hold fewer objects than this, so that messages alone never start a collection.
NEW_OBJECTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The part of the log for a relay, under the name of the subscription."""

    name: str
    topics: tuple[str, ...] | None
    tags: str | None
    filter: str | None
    start: Start
    on_dead: OnDead | None
    partitions: int | None
    compact: bool | None


#: The options in the help, by what a reader looks for.
SECTIONS = {
    "Database and settings": ("database", "database_file", "schema", "config"),
    "Destination": ("to", "to_file", "route"),
    "Messages and policy of the subscription": (
        "name", "topics", "tags", "filter", "start", "on_dead", "partitions", "compact",
    ),
    "Work": ("until_empty", "give_up_after", "keep", "lease"),
    "Watching": ("http", "heartbeat_file", "verbose", "log_format", "help"),
}  # fmt: skip
_EXAMPLES = {
    "Send every message, until a signal comes:": "outbox relay --to nats://localhost:4222",
    "Send a part under another name, delete old messages, and answer probes:": (
        "outbox relay --name audit --topics 'orders.*' --to kafka://k:9092 --keep 7d --http 0.0.0.0:9090"
    ),
}


class _InSections(click.Command):
    """A command whose help begins with examples, and has the options in sections."""

    examples = _EXAMPLES

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples and the sections."""
        with formatter.section("Examples"):
            for purpose, command in self.examples.items():
                formatter.write_text(purpose)
                # A command in one line can be copied.
                formatter.write(f"{'':{formatter.current_indent + 2}}{command}\n")
        options = {str(each.name): each for each in self.get_params(ctx)}
        for title, names in SECTIONS.items():
            records = (options[name].get_help_record(ctx) for name in names if name in options)
            with formatter.section(title):
                formatter.write_dl([each for each in records if each is not None])


@click.command(cls=_InSections)
@about_databases
@to_a_destination
@option(
    "--route",
    multiple=True,
    metavar="TOPIC=URL",
    callback=no_password,
    help="A destination for a topic or a pattern, as 'orders.*=nats://host:4222'; the first that matches counts,"
    " and the last is '*=URL'. May be given several times; in the environment with blanks between two.",
)
@option("--topics", type=NAMES, help="Only these topics; 'orders.*' is a pattern, '!orders.*' an exception.")
@by_content
@option("--name", default="relay", help="The subscription: one name, one selection, one destination.")
@option(
    "--from",
    "start",
    type=START,
    default="earliest",
    envvar="OUTBOX_RELAY_FROM",
    help="Where a new subscription begins.",
)
@option("--on-dead", type=click.Choice(["block", "continue"]), help="Whether a dead letter holds back the key. [block]")
@option("--partitions", type=click.IntRange(1), help="How many workers may share a new subscription. [1]")
@option("--compact/--no-compact", default=None, help="Send only the newest of a key's waiting messages.")
@as_value("reading", Reading)
@option("--until-empty", is_flag=True, help="Send all present messages, then end.")
@option(
    "--give-up-after",
    type=DURATION,
    default="60s",
    help="With --until-empty: end with exit code 4 when nothing could be sent for so long.",
)
@option("--keep", type=DURATION, help="Delete messages that are older, once every subscription has passed them.")
@option("--lease", type=DURATION, default="10s", help="Time until another worker takes over from a killed worker.")
@probed
def relay(
    *,
    targets: tuple[Target, ...],
    to: str | None,
    route: tuple[str, ...],
    reading: Reading,
    until_empty: bool,
    give_up_after: timedelta,
    keep: timedelta | None,
    lease: timedelta,
    probes: Probes,
) -> None:
    """Send the messages of the log to a destination.

    Runs until SIGTERM or SIGINT; calls under way end first, and a second signal ends the process at once. Several
    processes may run under one name: they share the partitions, and processes without a partition stand by. A new
    subscription has one partition, unless --partitions says otherwise.

    With --keep 7d the worker deletes older messages in small batches, while no more messages wait than one read takes.
    Messages that a subscription or an extract has not passed stay.

    With several databases or schemas there is a relay for each schema of each database; a database that is down delays
    no other. With --until-empty the exit code is 4 when a relay gave up.

    With --route there is a relay for each route, with a subscription of its own: NAME for '*', NAME:TOPIC for the
    others. Routes in the settings file also say how a destination gets its messages: prefix, rename, envelope,
    deadline, and narrow the topics by tags and filter. The file has attempts, batch_size and batch_bytes, too.
    """
    if not reading.name or not reading.name.isprintable():
        raise click.UsageError("--name must be one or more characters that can be printed")
    if keep is not None and keep <= timedelta(0):
        raise click.UsageError("--keep must be longer than 0s; without the option every message is kept")
    if lease < timedelta(seconds=1):
        raise click.UsageError("--lease must be at least 1s: a shorter lease would be lost before the first renewal")
    if until_empty:
        probes.require_none("--until-empty")
    config = current()
    source = _source_of(to=to, route=route or None, routes=config and config.routes)
    for name in ("topics", "tags", "filter"):
        if source != "to" and getattr(reading, name) is not None:
            raise click.UsageError(
                f"{as_given(source)} and {as_given(name)} exclude each other: each route has its own {name}"
            )

    from outbox.cli.relaying import Pace, run_relays
    from outbox.cli.routes import pace_of_file, routes_of_file, routes_of_options
    from outbox.model.retry import RetryPolicy
    from outbox.model.subscription import Declaration, require_own_name
    from outbox.model.topics import chosen_topics
    from outbox.relay.routes import Route, RouteOptions, planned
    from outbox.store.log.log import LIMITS
    from outbox.worker.settings import Settings

    if to is not None and source == "to":
        require_own_name(reading.name)
        only = Route(
            to=to,
            on_dead=reading.on_dead,
            partitions=reading.partitions,
            compact=reading.compact,
            tags=reading.tags,
            filter=reading.filter,
        )
        plan = [(only, Declaration(name=reading.name, destination=None, topics=chosen_topics(reading.topics)))]
    else:
        table = routes_of_file(config) if config is not None and source == "routes" else routes_of_options(route)
        shared: RouteOptions = {
            "on_dead": reading.on_dead, "partitions": reading.partitions, "compact": reading.compact
        }  # fmt: skip
        plan = list(planned(table, reading.name, **shared))
    retry, limits = (RetryPolicy(), LIMITS) if config is None else pace_of_file(config)
    # However long the lease is, a command that asks for the lease does not wait for long.
    renew_every = min(lease * 0.3, Settings().renew_every)
    pace = Pace(
        start=reading.start,
        retry=retry,
        settings=Settings(limits=limits, lease=lease, renew_every=renew_every),
        patience=give_up_after if until_empty else timedelta.max,
        keep=keep,
    )
    collect_rarely(NEW_OBJECTS)
    click.get_current_context().exit(run_relays(targets, plan, pace, probes))


def _source_of(**given: object) -> str:
    """Return the option with the destination, or `routes` of the settings file; an option counts before the file."""
    options = [name for name, value in given.items() if value is not None]
    options = [name for name in options if name != "routes" and not from_settings(name)] or options
    if len(options) > 1:
        raise click.UsageError(f"{' and '.join(map(as_given, options))} exclude each other; give only one")
    if not options:
        raise click.UsageError(
            "no destination: give --to URL (nats://host:4222, stdout:) or --to-file PATH, or --route, or routes in the"
            " settings file"
        )
    return options[0]
