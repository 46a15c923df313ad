"""`outbox doctor`: checks the database."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from outbox.cli.db import inbox_only_option, record_only_option, require_one
from outbox.cli.options import Target, about_a_database, as_json, option, to_a_destination
from outbox.cli.output import printable, say, show_json
from outbox.cli.roles import by_roles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.model.topics import Topics
    from outbox.relay.routes import Route
    from outbox.store.dialects.finding import Finding


@click.command()
@about_a_database
@option("--slots", type=int, help="The number of the application, to be compared.")
@record_only_option
@inbox_only_option
@by_roles
@to_a_destination
@as_json
def doctor(
    *,
    target: Target,
    slots: int | None,
    record_only: bool,
    inbox_only: bool,
    roles: Sequence[tuple[str, tuple[str, ...]]],
    to: str | None,
    json: bool,
) -> None:
    """Check the database, and say what to do about each finding; exit code 1 when there is any.

    The tables are compared with the needs of this version. Of the server are checked: version, clock, pooler, standby,
    copy, settings, connections in use, and transactions that keep dead rows from being removed. A role sees the
    sessions of other roles only with pg_read_all_stats. With roles, the rights of each are compared with those that
    outbox db grants prints. With --to, the settings of the destination are asked for under which messages are dropped
    or refused: Redis; and Kafka, NATS and RabbitMQ for the topics of the newest 10000 messages, under the names that
    routes of the settings file give them.

    In a database with no other table than an inbox, the inbox is checked alone.
    """
    require_one(slots, record_only=record_only, inbox_only=inbox_only)
    alone = record_only or inbox_only
    found = _findings_of_one(target, inbox=inbox_only) if alone else _findings(target, slots)
    found += _findings_of_roles(target, roles)
    found += [] if to is None else _findings_of_destination(target, to)
    if json:
        names = ("where", "problem", "evidence", "fix")
        show_json({"findings": [{name: getattr(each, name) for name in names} for each in found]})
    else:
        for each in found:
            click.echo(printable(each))
        say(f"findings: {len(found)}" if found else "everything is as it should be")
    click.get_current_context().exit(1 if found else 0)


def _findings_of_one(target: Target, *, inbox: bool) -> list[Finding]:
    from outbox.cli.connection import engine_of
    from outbox.schema import inbox_metadata, record_metadata
    from outbox.store.half_messages.record import RecordDatabase
    from outbox.store.idempotency.inbox import InboxDatabase
    from outbox.store.operations.check import findings_of_one

    of_database, metadata = (InboxDatabase, inbox_metadata) if inbox else (RecordDatabase, record_metadata)
    option = "--inbox-only" if inbox else "--record-only"
    engine = engine_of(target.url, make=target.commands.line("db", "upgrade", option))
    try:
        database = of_database(engine, target.schema, commands=target.commands)
        with closing(database.open()) as channel:
            return findings_of_one(channel, metadata(target.schema))
    finally:
        engine.dispose()


def _findings(target: Target, slots: int | None) -> list[Finding]:
    from outbox import migrate
    from outbox.cli.connection import open_channel
    from outbox.store.dialects.finding import Finding
    from outbox.store.operations.check import findings, holds_inbox_alone

    with open_channel(target.url, target.commands) as channel:
        if holds_inbox_alone(channel):
            return _findings_of_one(target, inbox=True)
        revision, head = migrate.current_revision(channel.database.engine, target.schema), migrate.head_revision()
        behind = revision not in (None, head) and migrate.knows(revision)
        found = findings(channel, slots, behind=behind)
    if behind:
        fix = f"run: {channel.database.upgrade_command}"
        found.insert(0, Finding("tables", f"are of revision {revision}, not {head}", fix))
    return found


def _findings_of_roles(target: Target, roles: Sequence[tuple[str, tuple[str, ...]]]) -> list[Finding]:
    from outbox.cli.connection import open_database

    if not roles:
        return []
    with open_database(target.url, target.commands) as database:
        check_rights = database.dialect.home.check_rights
        if check_rights is None:
            raise click.UsageError("an SQLite file has no roles")
        with database.engine.connect() as connection:
            return [each for role, tasks in roles for each in check_rights(connection, target.schema, role, tasks)]


def _findings_of_destination(target: Target, to: str) -> list[Finding]:
    from outbox.senders.connection_log import reason_of
    from outbox.senders.port import Stored
    from outbox.store.dialects.finding import Finding
    from outbox.store.operations.check import newest_topics

    with target.open_outbox() as channel:
        topics = {topic: Stored(*found) for topic, found in newest_topics(channel).items()}
    found = dict[Finding, None]()
    for route, chosen in _routes_to(to):
        with closing(route.open()) as sender:
            try:
                doubts = sender.doubts({topic: topics[topic] for topic in topics if chosen.matches(topic)})
            except Exception as error:
                return [Finding(sender.destination, f"does not tell its settings: {reason_of(error)}", "see why")]
            found.update((Finding(*each), None) for each in doubts)
    return [*found]


def _routes_to(to: str) -> list[tuple[Route, Topics]]:
    """Return the routes of the settings file to a destination with their topics; without any, all topics go there."""
    from outbox.cli import config
    from outbox.cli.routes import routes_of_file
    from outbox.model.topics import Topics
    from outbox.relay.routes import Route, planned
    from outbox.senders.port import destination_of

    settings, here = config.current(), destination_of(to)
    plan = () if settings is None or settings.routes is None else planned(routes_of_file(settings), "relay")
    found = [(replace(route, to=to), Topics.of(own.topics)) for route, own in plan if destination_of(route.to) == here]
    return found or [(Route(to=to), Topics.of(None))]
