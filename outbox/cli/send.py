"""`outbox send`: writes a message in a transaction of its own, for a first try."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from json import loads
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.options import DURATION, KEY, Target, about_a_database, as_json, option
from outbox.cli.output import tell

if TYPE_CHECKING:
    from outbox.store.database import Database


@click.command()
@about_a_database
@click.argument("topic")
@click.argument("body")
@option("--key", type=KEY, help="The unit of order.")
@option("--tags", help="One tag.")
@option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header. May be given several times.")
@option("--content-type", help="Of the body.  [text/plain; for JSON application/json]")
@option("--delay", type=DURATION, help="Time until the message may be sent.")
@as_json
def send(*, target: Target, topic: str, body: str, headers: tuple[str, ...], json: bool, **fields: Any) -> None:
    """Write a message to the log, in a transaction of its own, for a first try.

    BODY is text, or an object or a list in JSON; - reads the bytes of standard input. An application writes its
    messages in its own transactions instead, so that messages and data are committed together.
    """
    from outbox.cli.connection import open_channel_of, open_database
    from outbox.outbox import Outbox

    pairs = [each.partition("=") for each in headers]
    if wrong := [name for name, separator, _ in pairs if not separator]:
        raise click.UsageError(f"--header {wrong[0]}: write NAME=VALUE")
    content = sys.stdin.buffer.read() if body == "-" else body
    if fields["content_type"] is None and isinstance(content, str) and _is_json(content):
        fields["content_type"] = "application/json"
    with open_database(target.url, target.commands) as database, _refused(database), database.explained():
        with open_channel_of(database):
            outbox = Outbox(database.engine, schema=target.schema, slots=database.slots)
        with outbox.begin() as session:
            id = outbox.send(session, topic, content, headers={name: value for name, _, value in pairs}, **fields)
        outbox.close()
    tell(f"message {id} is in the log, topic {topic}", {"message_id": id, "topic": topic}, json=json)


@contextmanager
def _refused(database: Database) -> Iterator[None]:
    """Turn the error about a missing right into one with the right of a writer that is missing."""
    from outbox.cli.connection import Failure
    from outbox.cli.failures import FAILURE
    from outbox.store.failure import fix_of_writer

    try:
        yield
    except Exception as error:
        cause = getattr(error, "orig", None) or error
        if not database.dialect.errors.lacks_right(cause):
            raise
        fact = str(cause).partition("\n")[0]
        fix = fix_of_writer(cause, database.commands)
        if "outbox_meta" in fact:
            meta = database.names["meta"]
            fix = f"a command also reads how many slots the tables have: GRANT SELECT ON {meta} TO ROLE"
        raise Failure(f"the database refused: {fact}; {fix}", FAILURE) from None


def _is_json(body: str) -> bool:
    """Return whether a body is an object or a list in JSON; a number or a word is text as well."""
    try:
        return isinstance(loads(body), dict | list)
    except ValueError:
        return False
