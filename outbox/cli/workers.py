"""`outbox workers`: the processes that work for subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.options import Target, about_a_database, as_json, option
from outbox.cli.output import moment, say, show_json, show_table

if TYPE_CHECKING:
    from outbox.model.status import WorkerStatus

_HEADERS = (
    *("SUBSCRIPTION", "HOST", "PROCESS", "VERSION", "SINCE (UTC)"),
    *("PARTITIONS", "LAST SETTLE (UTC)", "LEASE UNTIL (UTC)", "NOTICE"),
)


@click.command()
@about_a_database
@option("--name", help="The subscription; otherwise all.")
@as_json
def workers(*, target: Target, name: str | None, json: bool) -> None:
    """List the processes that work for subscriptions, with their partitions and their last settle.

    A settle stores how far the worker is: also when messages are parked, because a destination is away. Partitions are
    counted; numbers, from 0, follow where a process has some of them. Processes that wait for a share of several
    partitions are listed, too. One that stands by for the only partition is not.
    """
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        found = Admin(channel).workers(name)
    if json:
        show_json({"workers": found})
    elif found:
        show_table(_HEADERS, map(_row, found), numbers=("PROCESS",))
    else:
        say("no worker runs")


def _row(worker: WorkerStatus) -> tuple[object, ...]:
    since, settled, until = (
        None if each is None else moment(each, zone=False)
        for each in (worker.since, worker.last_settle_at, worker.lease_until)
    )
    some = 0 < len(worker.partitions) < worker.partitions_in_all
    which = f": {','.join(map(str, worker.partitions))}" if some else ""
    partitions = f"{len(worker.partitions)} of {worker.partitions_in_all}{which}"
    who = (worker.subscription, worker.host or worker.name, worker.process, worker.version, since)
    return (*who, partitions, settled, until, worker.notice)
