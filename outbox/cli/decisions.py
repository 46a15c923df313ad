"""`outbox decisions`: what people decided, and when it was carried out."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import click

from outbox.cli.options import MOMENT, Target, about_a_database, as_json, at_most, option
from outbox.cli.output import counted, moment, say_the_end, show_json, show_table

if TYPE_CHECKING:
    from outbox.model.decision import Decision

_HEADERS = ("ID", "AT (UTC)", "BY", "DECISION", "SUBSCRIPTION", "WHAT", "MESSAGES", "DONE (UTC)", "REASON")


@click.command()
@about_a_database
@option("--name", help="Only about this subscription, which may be dropped by now.")
@option("--since", type=MOMENT, help="Only from this time on.")
@at_most
@option("--after", type=click.IntRange(1, 2**63 - 1), metavar="ID", help="Begin behind this decision.")
@as_json
def decisions(
    *, target: Target, name: str | None, since: datetime | None, limit: int, after: int | None, json: bool
) -> None:
    """List what people decided, the newest first. Decisions are kept for 90 days.

    A decision on messages is open until a worker has carried it out; MESSAGES is how many it was carried out on.
    """
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        found = Admin(channel).decisions(subscription=name, since=since, limit=limit + 1, after=after)
    if json:
        show_json({"decisions": found[:limit]}, more=len(found) > limit)
        return
    if found:
        show_table(_HEADERS, map(_row, found[:limit]), numbers=("ID", "MESSAGES"))
    say_the_end(found, limit, "no decisions", "--name or --since, go on by --after")


def _row(decision: Decision) -> tuple[object, ...]:
    done = "open" if decision.done_at is None else moment(decision.done_at, zone=False)
    return (
        decision.id,
        moment(decision.at, zone=False),
        decision.by,
        decision.verb.replace("_", " "),
        decision.subscription,
        _in_words(decision),
        decision.count,
        done,
        decision.reason,
    )


def _in_words(decision: Decision) -> str:
    """Return the choice in words; ids as their number."""
    words = [f"{name} {_shown(value)}" for name, value in decision.choice.items() if name != "ids"]
    ids = decision.choice.get("ids", ())
    some = [f"message {ids[0]}"] if len(ids) == 1 else [counted(len(ids), "message")] if ids else []
    return ", ".join([*some, *words])


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
