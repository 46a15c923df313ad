"""`outbox log`: the messages of the log, whether they were sent or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.cli.groups import Group
from outbox.cli.options import ID, KEY, Target, about_a_database, as_json, option
from outbox.cli.output import moment, printable, say, show_json, show_table

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.admin.results import Trace
    from outbox.model.message import Message

_HEADERS = ("ID", "CREATED (UTC)", "TOPIC", "KEY", "BYTES", "BODY")
#: Characters of a body in a table.
_SHOWN = 60


@click.group(cls=Group, no_args_is_help=True)
def log() -> None:
    """Look at the messages of the log, sent or not, until retention deletes them."""


@log.command()
@about_a_database
@option("--topic", help="Only of a topic.")
@option("--key", type=KEY, help="Only with a key.")
@option("--limit", type=click.IntRange(1, 10_000), default=20, help="Show at most so many.")
@as_json
def tail(*, target: Target, topic: str | None, key: str | None, limit: int, json: bool) -> None:
    """List the newest messages, in the order of the log.

    With --topic or --key the newest 10 000 messages are searched. Half messages are not shown.
    """
    from outbox.admin.admin import Admin
    from outbox.cli.contents import LISTED_BYTES

    with target.open_outbox() as channel:
        seen = Admin(channel).newest(limit=limit + 1, topic=topic, key=key)
    found = seen[-limit:]
    if json:
        show_json({"messages": [_as_json(each, LISTED_BYTES) for each in found]}, more=len(seen) > limit)
    elif found:
        show_table(_HEADERS, map(_row, found), numbers=("ID", "BYTES"))
    else:
        say("no messages")


@log.command()
@about_a_database
@click.argument("id", type=ID)
@as_json
def show(*, target: Target, id: int | UUID, json: bool) -> None:
    """Show a message with headers and body, and its way through each subscription.

    Of a message that was purged but is still parked, headers and body are shown by parked show.
    """
    from outbox.admin.admin import Admin
    from outbox.cli.connection import Failure
    from outbox.cli.contents import show_contents, show_fields
    from outbox.cli.failures import USAGE

    with target.open_outbox() as channel:
        trace = Admin(channel).trace(id)
        found = None if trace is None else Admin(channel).message(trace.id)
    if trace is None:
        raise Failure(f"no message {id} is in the log; perhaps it was purged", USAGE)
    ways = {"in_log": found is not None, "subscriptions": trace.subscriptions}
    if json:
        show_json({**(_fields(trace) if found is None else _as_json(found)), **ways})
        return
    show_fields(_fields(trace))
    for each in trace.subscriptions:
        click.echo(printable(f"{each.subscription}: {each.what}"))
    if found is not None:
        show_contents(found)


def _fields(message: Message | Trace) -> dict[str, object]:
    return {name: getattr(message, name) for name in ("id", "message_id", "topic", "key", "created_at")}


def _as_json(message: Message, most: int | None = None) -> dict[str, object]:
    from outbox.cli.contents import contents_of

    return {**_fields(message), **contents_of(message, most=most)}


def _row(message: Message) -> tuple[object, ...]:
    created = None if message.created_at is None else moment(message.created_at, zone=False)
    body = message.body.decode(errors="replace")
    shown = body if len(body) <= _SHOWN else f"{body[:_SHOWN]}…"
    return (message.id, created, message.topic, message.key, len(message.body), shown)
