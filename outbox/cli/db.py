"""`outbox db`: the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from outbox.cli.groups import Group
from outbox.cli.options import Target, about_a_database, as_json, configured, option
from outbox.cli.output import printable, say, show_json, tell, warn
from outbox.store.dialects.kinds import KINDS

if TYPE_CHECKING:
    from outbox.store.dialects.finding import Finding


@click.group(cls=Group, no_args_is_help=True)
def db() -> None:
    """Make the tables, check the tables, and print the rights on the tables."""


_slots = option(
    "--slots", type=click.IntRange(1, 32_767), help="Shares of the key space; fixed when the tables are made."
)


_record_only = option(
    "--record-only",
    is_flag=True,
    help='A business database without an outbox: only the table for transactions with verdict="record".',
)
_inbox_only = option(
    "--inbox-only", is_flag=True, help="The database of a consumer without an outbox: only the table for its Inbox."
)


@db.command()
@about_a_database
@_slots
@_record_only
@_inbox_only
@as_json
def upgrade(*, target: Target, slots: int | None, record_only: bool, inbox_only: bool, json: bool) -> None:
    """Create the tables, or bring old tables up to date; does no harm to tables of this version."""
    _require_one(slots, record_only=record_only, inbox_only=inbox_only)
    before = after = None
    if record_only or inbox_only:
        action, told = _upgrade_one(target, inbox=inbox_only)
    else:
        before, after, are_there = _upgrade(target, slots)
        action, told = "created" if before is None else "upgraded", f"upgraded from {before or 'nothing'} to {after}"
        if before == after:
            action, told = "none", f"the tables are up to date ({after})"
        elif before is None and are_there:
            action, told = "taken_over", f"took over the tables that were there, as they are complete ({after})"
    tell(told, {"action": action, "before": before, "after": after}, json=json)


def _require_one(slots: int | None, *, record_only: bool, inbox_only: bool) -> None:
    if record_only and inbox_only:
        raise click.UsageError("--record-only and --inbox-only exclude each other: make one after the other")
    if record_only and slots is not None:
        raise click.UsageError("--record-only and --slots exclude each other: records have no keys")
    if inbox_only and slots is not None:
        raise click.UsageError("--inbox-only and --slots exclude each other: an inbox has no keys")


def _upgrade_one(target: Target, *, inbox: bool) -> tuple[str, str]:
    """Make the table of an inbox or of records, in a database without an outbox; return the action, also in words."""
    from sqlalchemy import inspect

    from outbox import migrate
    from outbox.cli.connection import engine_of
    from outbox.store.label import label_of

    engine = engine_of(target.url, create=True)
    try:
        has_outbox = inspect(engine).has_table("outbox_message", schema=target.schema)
        is_new = (migrate.upgrade_inbox if inbox else migrate.upgrade_record)(engine, target.schema)
    finally:
        engine.dispose()
    where, table = label_of(engine.url, target.schema), "outbox_inbox" if inbox else "outbox_record"
    if has_outbox and inbox:
        warn("this database has an outbox, and its inbox with it; run: outbox db upgrade")
    elif has_outbox:
        warn(
            "this database has an outbox; records belong into the business database of a producer with an outbox"
            " elsewhere"
        )
    done = ("created", "made the table {}") if is_new else ("none", "the table {} is there already")
    return done[0], f"{where}: {done[1].format(table)}"


def _upgrade(target: Target, slots: int | None) -> tuple[str | None, str | None, bool]:
    """Upgrade; return the revision before and after, and whether there were tables."""
    from sqlalchemy import inspect

    from outbox import migrate
    from outbox.cli.connection import engine_of
    from outbox.model.slots import SLOTS

    engine = engine_of(target.url, create=True)
    try:
        are_there = inspect(engine).has_table("outbox_message", schema=target.schema)
        before = migrate.current_revision(engine, target.schema)
        migrate.upgrade(engine, target.schema, slots or SLOTS)
        after = migrate.current_revision(engine, target.schema)
    finally:
        engine.dispose()
    return before, after, are_there


@db.command()
@about_a_database
@option("--slots", type=int, help="The number of the application, to be compared.")
@_record_only
@_inbox_only
@as_json
def check(*, target: Target, slots: int | None, record_only: bool, inbox_only: bool, json: bool) -> None:
    """Compare the database with the needs of this version; exit code 1 when something differs.

    In a database with no other table than an inbox, the inbox is checked alone.
    """
    _require_one(slots, record_only=record_only, inbox_only=inbox_only)
    alone = record_only or inbox_only
    found = _findings_of_one(target, inbox=inbox_only) if alone else _findings(target, slots)
    if json:
        show_json({"findings": [{"where": each.where, "problem": each.problem, "fix": each.fix} for each in found]})
    else:
        for each in found:
            click.echo(printable(each))
        say(f"findings: {len(found)}" if found else "everything is as it should be")
    click.get_current_context().exit(1 if found else 0)


def _findings_of_one(target: Target, *, inbox: bool) -> list[Finding]:
    from contextlib import closing

    from outbox.cli.connection import engine_of
    from outbox.schema import inbox_metadata, record_metadata
    from outbox.store.half_messages.record import RecordDatabase
    from outbox.store.idempotency.inbox import InboxDatabase
    from outbox.store.operations.check import findings_of_one

    of_database, metadata = (InboxDatabase, inbox_metadata) if inbox else (RecordDatabase, record_metadata)
    option = "--inbox-only" if inbox else "--record-only"
    engine = engine_of(target.url, make=f"outbox db upgrade {option}")
    try:
        database = of_database(engine, target.schema)
        with closing(database.open()) as channel:
            return findings_of_one(channel, metadata(target.schema))
    finally:
        engine.dispose()


def _findings(target: Target, slots: int | None) -> list[Finding]:
    from outbox import migrate
    from outbox.cli.connection import open_channel
    from outbox.store.dialects.finding import Finding
    from outbox.store.operations.check import NEWER, findings, holds_inbox_alone

    with open_channel(target.url, target.schema) as channel:
        if holds_inbox_alone(channel):
            return _findings_of_one(target, inbox=True)
        revision, head = migrate.current_revision(channel.database.engine, target.schema), migrate.head_revision()
        behind = revision not in (None, head) and migrate.knows(revision)
        found = findings(channel, slots, behind=behind)
    if revision not in (None, head):
        fix = f"run: {channel.database.upgrade_command}" if behind else NEWER
        found.insert(0, Finding("tables", f"are of revision {revision}, not {head}", fix))
    return found


_schema = option("--schema", envvar="OUTBOX_SCHEMA", metavar="NAME", help="Schema of the tables (PostgreSQL).")


@db.command()
@option("--dialect", type=click.Choice(list(KINDS)), default="postgresql")
@_schema
@_slots
@configured
def sql(*, dialect: str, schema: str | None, slots: int | None) -> None:
    """Print the SQL for the tables, to be applied by hand. Needs no database."""
    from outbox import migrate
    from outbox.model.slots import SLOTS

    click.echo(migrate.sql(dialect, schema, slots or SLOTS), nl=False)


class _Role(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """The name of a role, as it is written in PostgreSQL's catalogue, without quotes."""

    name = "role"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return a name that PostgreSQL would not cut."""
        if not 0 < len(value.encode()) <= _LONGEST_ROLE:
            self.fail(f"the name of a role has 1 to {_LONGEST_ROLE} bytes, not {len(value.encode())}", param, ctx)
        return str(value)


_LONGEST_ROLE = 63
#: By its option each kind of process, with the options for what else the process does.
_TASKS = {"writer": ("direct", "dedup", "transactions"), "relay": ("purge",), "reader": ("register",)}


@db.command()
@_schema
@option("--writer", type=_Role(), help="The role of applications, which send.")
@option("--direct", is_flag=True, help="The writer sends messages to the destination itself, after the commit.")
@option("--dedup", is_flag=True, help="The writer gives dedup keys.")
@option("--transactions", is_flag=True, help="The writer is a TransactionMQProducer.")
@option("--relay", type=_Role(), help="The role of relays, and of consumers over the log.")
@option("--purge", is_flag=True, help="The relay deletes old messages.")
@option("--reader", type=_Role(), help="The role of Spark and of outbox extract.")
@option("--register", is_flag=True, help="The reader registers, so that a purge waits for the reader.")
@configured
def grants(*, schema: str | None, **given: Any) -> None:
    """Print the least rights of each role as SQL for PostgreSQL, to be executed by the owner of the tables.

    A role of several options gets the rights of all: a producer that also checks back is a writer and a relay. The
    owner runs all other commands.
    """
    from outbox.store.database import require_schema_name
    from outbox.store.dialects.postgresql.grants import grants

    require_schema_name(schema)
    if not any(given[kind] for kind in _TASKS):
        raise click.UsageError("no role: give --writer, --relay or --reader")
    for kind, more in _TASKS.items():
        chosen = [task for task in more if given[task]]
        if chosen and not given[kind]:
            raise click.UsageError(f"--{chosen[0]} is a task of the {kind}: give --{kind} ROLE, too")
        if given[kind]:
            click.echo("\n".join(grants(schema, given[kind], (kind, *chosen))))
