"""`outbox relay`: the worker that sends messages to a destination."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outbox.cli.garbage_collector import collect_rarely
from outbox.cli.options import (
    DURATION,
    NAMES,
    START,
    Target,
    about_databases,
    as_given,
    as_value,
    by_routes,
    option,
    rewritten,
    to_a_destination,
)

if TYPE_CHECKING:
    from outbox.model.retry import RetryPolicy
    from outbox.model.subscription import OnDead, Start
    from outbox.relay.routes import Plan
    from outbox.senders.envelopes import EnvelopeName
    from outbox.worker.settings import Settings, Until


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The part of the log that a relay reads, under the name of its subscription."""

    name: str
    topics: tuple[str, ...] | None
    start: Start
    on_dead: OnDead | None
    partitions: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form in which messages are sent."""

    prefix: str | None
    rename: tuple[str, ...]
    envelope: EnvelopeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """When the command ends by itself."""

    once: bool
    until_empty: bool
    give_up_after: timedelta

    @property
    def until(self) -> Until:
        """Where its work ends."""
        if self.once and self.until_empty:
            raise click.UsageError("--once and --until-empty exclude each other")
        return "once" if self.once else "empty" if self.until_empty else "stopped"

    @property
    def patience(self) -> timedelta:
        """How long the destination may be silent."""
        return timedelta.max if self.until == "stopped" else self.give_up_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """How much a relay takes at a time, and for how long."""

    batch_size: int
    batch_bytes: int
    lease: timedelta
    deadline: timedelta | None
    attempts: int

    @property
    def retry(self) -> RetryPolicy:
        """How often a message is tried."""
        from outbox.model.retry import RetryPolicy

        return RetryPolicy(attempts=self.attempts)

    @property
    def settings(self) -> Settings:
        """The pace of a worker."""
        from outbox.store.log.limits import Limits
        from outbox.worker.settings import Settings

        return Settings(
            limits=Limits(rows=self.batch_size, bytes=self.batch_bytes),
            lease=self.lease,
            # However long the lease is, a command that asks for it does not wait for long.
            renew_every=min(self.lease * 0.3, Settings().renew_every),
        )


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
@option("--partitions", type=click.IntRange(1), help="How many workers may share a new subscription. [1]")
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
@as_value("reading", Reading)
@as_value("form", Form)
@as_value("ending", Ending)
@as_value("pacing", Pacing)
def relay(
    *,
    targets: tuple[Target, ...],
    to: str | None,
    route: tuple[str, ...],
    config: Path | None,
    reading: Reading,
    form: Form,
    ending: Ending,
    pacing: Pacing,
) -> None:
    """Send the messages of the log to a destination.

    Runs until SIGTERM or SIGINT, which let it finish what is under way; a second one ends it at once. Several
    processes may run under one name: they share its partitions, and those for which none is left stand by. There is one
    partition, unless --partitions says otherwise when nobody has run the subscription yet.

    With several databases or schemas there is a relay for each schema of each database; one that is down delays no
    other. With --once and --until-empty the exit code is 4 when one of them gave up.

    With --route or --config there is a relay for each route, with a subscription of its own: NAME for '*', NAME:TOPIC
    for the others.
    """
    until = ending.until
    _require_name(reading.name)
    _require_pace(pacing.lease, pacing.deadline)
    source = _source_of(to=to, route=route or None, config=config)
    if to is None:
        _require_no_other(source, reading, form)

    from outbox.cli.relaying import Pace, relay_until

    plan = _routed(route, config, reading, pacing) if to is None else _direct(to, reading, form, pacing)
    pace = Pace(start=reading.start, retry=pacing.retry, settings=pacing.settings, patience=ending.patience)
    collect_rarely()
    click.get_current_context().exit(relay_until(until, targets, plan, pace))


def _direct(to: str, reading: Reading, form: Form, pacing: Pacing) -> Plan:
    """Return the plan for one destination."""
    from outbox.cli.routes import renamed
    from outbox.model.subscription import Declaration, require_own_name
    from outbox.model.topics import chosen_topics
    from outbox.relay.routes import Route

    require_own_name(reading.name)
    route = Route(
        to=to,
        rename=renamed(form.rename),
        prefix=form.prefix,
        envelope=form.envelope,
        on_dead=reading.on_dead,
        deadline=pacing.deadline,
        partitions=reading.partitions,
    )
    return [(route, Declaration(name=reading.name, destination=None, topics=chosen_topics(reading.topics)))]


def _routed(given: tuple[str, ...], config: Path | None, reading: Reading, pacing: Pacing) -> Plan:
    """Return the plan for a destination of each topic."""
    from outbox.cli.routes import routes_of_file, routes_of_options
    from outbox.relay.routes import planned

    table = routes_of_options(given) if config is None else routes_of_file(config)
    return planned(
        table, reading.name, on_dead=reading.on_dead, deadline=pacing.deadline, partitions=reading.partitions
    )


def _source_of(**given: object) -> str:
    """Return the option that says where messages go."""
    options = [as_given(name) for name, value in given.items() if value is not None]
    if len(options) > 1:
        raise click.UsageError(f"{' and '.join(options)} exclude each other; give one of them")
    if not options:
        raise click.UsageError(
            "no destination: give --to URL (nats://host:4222, stdout:) or --to-file PATH, or --route or --config"
        )
    return options[0]


def _require_no_other(source: str, reading: Reading, form: Form) -> None:
    """Refuse options that each route has for itself. `source`: the option that gives the routes."""
    if reading.topics is not None:
        raise click.UsageError(f"{source} and --topics exclude each other: each route has its own topics")
    if form != Form(prefix=None, rename=(), envelope="raw"):
        raise click.UsageError(
            f"{source} excludes --prefix, --rename and --envelope; write them into the table of a route (--config)"
        )


def _require_name(name: str) -> None:
    if not name or not name.isprintable():
        raise click.UsageError("--name must be one or more characters that can be printed")


def _require_pace(lease: timedelta, deadline: timedelta | None) -> None:
    if lease < timedelta(seconds=1):
        raise click.UsageError("--lease must be at least 1s, or it would be lost before it is renewed")
    if deadline is not None and deadline <= timedelta(0):
        raise click.UsageError("--deadline must be greater than 0")
