"""`outbox consume`: a worker that calls the functions of a consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.options import logged, option
from outbox.cli.output import say
from outbox.cli.probes import Probes, probed, run_probed
from outbox.cli.statuses import selected
from outbox.runtime.garbage import collect_rarely
from outbox.runtime.text import counted

if TYPE_CHECKING:
    from outbox.consumer.consumer import Consumer
    from outbox.telemetry.events import Event

#: As many as a batch and the batches read ahead hold. Not as many as for a relay: what functions of an application
#: leave behind in cycles may be large.
NEW_OBJECTS = 10_000


@click.command()
@click.argument("consumer", metavar="MODULE:CONSUMER")
@option("--partitions", type=click.IntRange(1), help="How many processes may share a new group.  [as in the code]")
@option("--concurrency", type=click.IntRange(1), help="Calls under way at once in this process.  [as in the code]")
@probed
@logged
def consume(*, consumer: str, partitions: int | None, concurrency: int | None, probes: Probes) -> None:
    """Handle messages of the log by the functions of an application.

    MODULE:CONSUMER names an object made by outbox.consumer(…), for example shop.consumers:billing. The database is the
    one of the object's own outbox. The module is looked for in the current folder first.

    Runs until SIGTERM or SIGINT; calls under way end first, and a second signal ends the process at once. Several
    processes may run the same consumer: they share the partitions, and processes without a partition stand by. The
    exit code is 4 when calls never come back.
    """
    from outbox.admin.admin import Admin
    from outbox.cli.failures import UNFINISHED
    from outbox.relay.supervisor import Supervisor

    found = _found(consumer)
    try:
        found.configure(partitions=partitions, concurrency=concurrency)
    except ValueError as error:
        raise click.UsageError(f"consume {consumer}: {error}") from None
    collect_rarely(NEW_OBJECTS)
    handled = _Handled()
    with found.outbox.database.explained():
        _announce(found, consumer)
        found.outbox.listeners.listen(handled.told)
        # Time for a call under way, and for a renewal of the lease.
        supervisor = Supervisor([found], drain=found.deadline + found.settings.lease, pause=None)
        healthy = run_probed(supervisor, probes, {found.label: Admin(found.outbox.database).look})
    say(f"{found.name}: stopped; {counted(handled.messages, 'message')} handled")
    click.get_current_context().exit(0 if healthy and not supervisor.unfinished else UNFINISHED)


class _Handled:
    """Counts handled messages."""

    def __init__(self) -> None:
        self.messages = 0

    def told(self, event: Event) -> None:
        from outbox.telemetry.events import Settled

        if isinstance(event, Settled):
            self.messages += len(event.messages)


def _found(name: str) -> Consumer:
    from outbox.cli.loading import loaded
    from outbox.consumer.consumer import Consumer

    found = loaded(name, "consume")
    if not isinstance(found, Consumer):
        raise click.UsageError(
            f"consume {name}: it is no consumer but {type(found).__name__}; name the result of outbox.consumer(…)"
        )
    return found


def _announce(consumer: Consumer, given: str) -> None:
    """Tell the topics and the begin; raise for a database that does not fit."""
    from outbox.cli.connection import open_channel_of
    from outbox.cli.relaying import beginning
    from outbox.store.subscriptions.subscriptions import Subscriptions

    with open_channel_of(consumer.outbox.database) as channel:
        declared = consumer.declared
        Subscriptions(channel).check(declared)
        begin = beginning(channel, consumer.name, consumer.start_at)
        say(f"{consumer.name}: {selected(declared)} to {given}, {begin}")
