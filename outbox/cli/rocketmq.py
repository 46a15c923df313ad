"""`outbox rocketmq`: a front for the official clients of RocketMQ 5."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outbox.cli.groups import Group
from outbox.cli.options import DURATION, Target, about_a_database, as_value, option
from outbox.cli.output import say
from outbox.cli.probes import Probes, probed, run_probed
from outbox.cli.rocketmq_names import groups, topics

if TYPE_CHECKING:
    from outbox.admin.results import Look

#: For so long a stop waits for calls and questions under way.
_DRAIN = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The options for a `CheckPolicy`."""

    transaction_timeout: timedelta
    check_interval: timedelta
    check_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The options for a `ClientPolicy`."""

    max_clients: int
    create_topics: str
    strict_groups: bool


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


rocketmq.add_command(topics)
rocketmq.add_command(groups)


@rocketmq.command()
@about_a_database
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
    "--create-topics",
    type=click.Choice(["NORMAL", "no"]),
    default="no",
    help="Whether a topic that is not there is made when a client asks for it.",
)
@option("--strict-groups", is_flag=True, help="Only consumer groups that were added receive.")
@as_value("clients", ClientOptions)
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
    listen: str,
    advertise: str | None,
    policy: Policy,
    clients: ClientOptions,
    security: SecurityOptions,
    probes: Probes,
) -> None:
    """Serve the official clients, over gRPC.

    Messages go into the log, half messages wait for their verdict, and producers are asked about open transactions.
    Consumers receive what is committed, and so do relays of the outbox. Runs until SIGTERM or SIGINT. Several processes
    may serve an outbox: all know the topics and groups of outbox rocketmq topics and outbox rocketmq groups.
    """
    from outbox.admin.admin import Admin
    from outbox.cli.connection import checked_label, open_channel_of, open_database
    from outbox.cli.failures import UNFINISHED
    from outbox.outbox import Outbox
    from outbox.relay.supervisor import Supervisor
    from outbox.rocketmq.checker import CheckPolicy
    from outbox.rocketmq.front.clients import ClientPolicy
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
                listen=listen,
                advertise=advertise,
                policy=CheckPolicy(**asdict(policy)),
                clients=ClientPolicy(
                    most=clients.max_clients,
                    create_topics=clients.create_topics == "NORMAL",
                    strict_groups=clients.strict_groups,
                ),
                security=Security(**asdict(security)),
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        supervisor = Supervisor([front], drain=_DRAIN, pause=None)
        healthy = run_probed(supervisor, probes, {checked_label(target.url, target.schema): look})
        outbox.close()
    say(f"{front.name}: stopped")
    click.get_current_context().exit(0 if healthy and not supervisor.unfinished else UNFINISHED)
