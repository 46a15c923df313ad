"""`outbox db`: the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from outbox.cli.groups import Group
from outbox.cli.options import Target, about_a_database, as_json, configured, option
from outbox.cli.output import tell, warn
from outbox.cli.roles import by_roles
from outbox.store.dialects.kinds import KINDS

if TYPE_CHECKING:
    from sqlalchemy import Engine


@click.group(cls=Group, no_args_is_help=True)
def db() -> None:
    """Make the tables, and print the rights of each role."""


_slots = option(
    "--slots", type=click.IntRange(1, 32_767), help="Shares of the key space; fixed when the tables are made."
)


record_only_option = option(
    "--record-only",
    is_flag=True,
    help='A business database without an outbox: only the table for transactions with verdict="record".',
)
inbox_only_option = option(
    "--inbox-only", is_flag=True, help="The database of a consumer without an outbox: only the table for its Inbox."
)


@db.command()
@about_a_database
@_slots
@record_only_option
@inbox_only_option
@as_json
def upgrade(*, target: Target, slots: int | None, record_only: bool, inbox_only: bool, json: bool) -> None:
    """Create the tables, or bring old tables up to date; does no harm to tables of this version."""
    require_one(slots, record_only=record_only, inbox_only=inbox_only)
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


@db.command()
@about_a_database
@option("--to", required=True, metavar="REVISION", help="The newest revision of the version to go back to.")
@as_json
def downgrade(*, target: Target, to: str, json: bool) -> None:
    """Bring the tables back to an earlier revision, with all that they hold.

    Workers of this version stop, and lose nothing; those of the version with that revision may begin. Writers
    go on meanwhile.
    """
    from outbox import migrate

    engine, patient = _engines(target)
    try:
        before = migrate.current_revision(engine, target.schema)
        migrate.downgrade(patient, to, target.schema)
    finally:
        engine.dispose()
        patient.dispose()
    action, told = "downgraded", f"downgraded from {before} to {to}"
    if before == to:
        action, told = "none", f"the tables are of revision {to} already"
    tell(told, {"action": action, "before": before, "after": to}, json=json)


def require_one(slots: int | None, *, record_only: bool, inbox_only: bool) -> None:
    """Refuse options that exclude each other."""
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

    engine = engine_of(target.url, make=target.commands.line("db", "upgrade"), create=True)
    try:
        has_outbox = inspect(engine).has_table("outbox_message", schema=target.schema)
        is_new = (migrate.upgrade_inbox if inbox else migrate.upgrade_record)(engine, target.schema)
    finally:
        engine.dispose()
    where, table = label_of(engine.url, target.schema), "outbox_inbox" if inbox else "outbox_record"
    if has_outbox and inbox:
        upgrade = target.commands.line("db", "upgrade")
        warn(f"this database has an outbox, and its inbox with it; run: {upgrade}")
    elif has_outbox:
        warn(
            "this database has an outbox; records belong into the business database of a producer with an outbox"
            " elsewhere"
        )
    done = ("created", "made the table {}") if is_new else ("none", "the table {} is there already")
    return done[0], f"{where}: {done[1].format(table)}"


def _upgrade(target: Target, slots: int | None) -> tuple[str | None, str | None, bool]:
    """Upgrade; return the revision before and after, and whether there were tables."""
    from sqlalchemy import inspect, select

    from outbox import migrate
    from outbox.model.slots import SLOTS
    from outbox.schema import tables

    engine, patient = _engines(target)
    try:
        are_there = inspect(engine).has_table("outbox_message", schema=target.schema)
        before = migrate.current_revision(engine, target.schema)
        migrate.upgrade(patient, target.schema, slots or SLOTS)
        after = migrate.current_revision(engine, target.schema)
        with engine.connect() as connection:
            stored = connection.scalar(select(tables(target.schema, engine.dialect.name).meta.c.slots))
    finally:
        engine.dispose()
        patient.dispose()
    if slots not in (None, stored):
        warn(f"the tables have {stored} slots, not {slots}: the number was fixed when they were made")
    return before, after, are_there


def _engines(target: Target) -> tuple[Engine, Engine]:
    """Return an engine for questions, and a patient one, because an index of a large table is made for minutes."""
    from outbox.cli.connection import engine_of

    make = target.commands.line("db", "upgrade")
    engine, patient = (engine_of(target.url, make=make, create=True, patient=each) for each in (False, True))
    return engine, patient


_schema = option("--schema", envvar="OUTBOX_SCHEMA", metavar="NAME", help="Schema of the tables (PostgreSQL).")


@db.command()
@option("--dialect", type=click.Choice(list(KINDS)), default="postgresql")
@_schema
@_slots
@option("--function", is_flag=True, help="Instead, outbox_send(…) for writers in SQL and other languages (PostgreSQL).")
@configured
def sql(*, dialect: str, schema: str | None, slots: int | None, function: bool) -> None:
    """Print the SQL for the tables, to be applied by hand. Needs no database."""
    from outbox import migrate
    from outbox.model.slots import SLOTS

    if function:
        from outbox.store.database import require_schema_name
        from outbox.store.dialects import part_of
        from outbox.store.dialects.dialect import Dialect

        made = part_of(dialect, Dialect).home.send_function
        if made is None:
            raise click.UsageError(f"--function is for PostgreSQL; {KINDS[dialect]} has no functions in SQL")
        require_schema_name(schema)
        click.echo(made(schema, slots or SLOTS), nl=False)
        return
    click.echo(migrate.sql(dialect, schema, slots or SLOTS), nl=False)


@db.command()
@_schema
@by_roles
@configured
def grants(*, schema: str | None, roles: Sequence[tuple[str, tuple[str, ...]]]) -> None:
    """Print the least rights of each role as SQL for PostgreSQL, to be executed by the owner of the tables.

    A role of several options gets the rights of all: a producer that also checks back is a writer and a relay. The
    owner runs all other commands.
    """
    from outbox.store.database import require_schema_name
    from outbox.store.dialects.postgresql.grants import grants

    require_schema_name(schema)
    if not roles:
        raise click.UsageError("no role: give --writer, --relay, --front, --reader or --dashboard")
    for role, tasks in roles:
        click.echo("\n".join(grants(schema, role, tasks)))
