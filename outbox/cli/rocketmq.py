"""`outbox rocketmq`: a front for the official clients of RocketMQ 5."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from outbox.cli.groups import Group
from outbox.cli.options import DURATION, Target, about_a_database, as_value, option
from outbox.cli.output import say
from outbox.cli.probes import Probes, probed, run_probed

if TYPE_CHECKING:
    from outbox.admin.results import Look
    from outbox.rocketmq.front.routing import TopicType

#: For so long a stop waits for calls and questions under way.
_DRAIN = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The options for a `CheckPolicy`."""

    transaction_timeout: timedelta
    check_interval: timedelta
    check_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions:
    """The options for a `Security`."""

    auth_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_listen: str | None
    tls_advertise: str | None


@click.group(cls=Group, no_args_is_help=True)
def rocketmq() -> None:
    """Serve the official clients of RocketMQ 5 from an outbox."""


@rocketmq.command()
@about_a_database
@option(
    "--topic",
    "topics",
    multiple=True,
    required=True,
    metavar="NAME[=TYPE]",
    help=(
        "A topic with its type: NORMAL, FIFO, DELAY or TRANSACTION; without a type NORMAL. May be given several times."
    ),
)
@option(
    "--fifo-group",
    "fifo_groups",
    multiple=True,
    metavar="NAME",
    help="A consumer group that takes the messages of a message group in order. May be given several times.",
)
@option("--listen", default="127.0.0.1:8081", metavar="HOST:PORT", help="The place to listen at.")
@option("--advertise", metavar="HOST:PORT", help="The place for clients, such as a load balancer.  [--listen]")
@option("--transaction-timeout", type=DURATION, default="6s", help="Age below which no producer is asked.")
@option("--check-interval", type=DURATION, default="30s", help="Pause between two questions about a transaction.")
@option(
    "--check-max", type=click.IntRange(1), default=15, help="Questions without an answer until a person has to decide."
)
@as_value("policy", Policy)
@option("--max-clients", type=click.IntRange(1), default=5000, help="Further clients are refused until one has gone.")
@option(
    "--auth-file",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Access keys of clients, a line each: access_key:secret or access_key:secret:topic,topic.  [every client]",
)
@option("--tls-cert", type=click.Path(path_type=Path), metavar="PATH", help="The certificate with its chain, in PEM.")
@option("--tls-key", type=click.Path(path_type=Path), metavar="PATH", help="The private key of --tls-cert.")
@option("--tls-listen", metavar="HOST:PORT", help="A second place, with TLS; --listen is then without.  [--listen]")
@option("--tls-advertise", metavar="HOST:PORT", help="The place for clients of --tls-listen.  [--tls-listen]")
@as_value("security", SecurityOptions)
@probed
def serve(
    *,
    target: Target,
    topics: tuple[str, ...],
    fifo_groups: tuple[str, ...],
    listen: str,
    advertise: str | None,
    policy: Policy,
    max_clients: int,
    security: SecurityOptions,
    probes: Probes,
) -> None:
    """Serve the official clients, over gRPC.

    Messages go into the log, half messages wait for their verdict, and producers are asked about open transactions.
    Consumers receive what is committed, and so do relays of the outbox. Runs until SIGTERM or SIGINT. Several processes
    may serve an outbox, each with the same topics and groups.
    """
    from outbox.admin.admin import Admin
    from outbox.cli.connection import checked_label, open_channel_of, open_database
    from outbox.cli.failures import UNFINISHED
    from outbox.outbox import Outbox
    from outbox.relay.supervisor import Supervisor
    from outbox.rocketmq.checker import CheckPolicy
    from outbox.rocketmq.front.front import Front
    from outbox.rocketmq.front.security import Security

    def look() -> Look:
        with target.open_outbox() as channel:
            return Admin(channel).look()

    with open_database(target.url, target.commands) as database, database.explained():
        with open_channel_of(database):
            outbox = Outbox(database.engine, schema=target.schema, slots=database.slots)
        try:
            front = Front(
                outbox,
                topics=dict(map(_topic, topics)),
                fifo_groups=fifo_groups,
                listen=listen,
                advertise=advertise,
                policy=CheckPolicy(**asdict(policy)),
                max_clients=max_clients,
                security=Security(**asdict(security)),
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        supervisor = Supervisor([front], drain=_DRAIN, pause=None)
        healthy = run_probed(supervisor, probes, {checked_label(target.url, target.schema): look})
        outbox.close()
    say(f"{front.name}: stopped")
    click.get_current_context().exit(0 if healthy and not supervisor.unfinished else UNFINISHED)


def _topic(text: str) -> tuple[str, TopicType]:
    """Return the name and the type of a topic; the front checks both."""
    name, _, type_ = text.partition("=")
    return name, cast("TopicType", type_ or "NORMAL")
