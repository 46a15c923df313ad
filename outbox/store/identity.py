"""The identity of an outbox, one row: version, slots, the server that draws the ids; and the other first rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Table
from sqlalchemy.engine import Dialect as EngineDialect

from outbox.errors import DatabaseError, SchemaError
from outbox.model.position import EARLIEST
from outbox.schema import PREFIX, VERSION, Tables
from outbox.store.database import Channel
from outbox.store.dialects import part_of
from outbox.store.dialects.dialect import Dialect
from outbox.store.dialects.native import Native
from outbox.store.dialects.statements import Row

#: The fix where a later version of this library has made the tables, and this version cannot use them.
NEWER = "install a newer outbox-log"
_READ = "SELECT version, slots, system_identifier, database_oid FROM {meta}"
_CREATE = """
    {insert_once} {meta} (one, version, slots, system_identifier, database_oid, installation)
    SELECT 1, {version}, {slots}, i.system_identifier, i.database_oid, {installation} FROM ({identity}) AS i
    WHERE NOT EXISTS (SELECT 1 FROM {meta}) {unless_there}
"""
_ADOPT = "UPDATE {meta} SET system_identifier = :system, database_oid = :oid"

#: A worker that cannot settle under its epoch takes its lease anew, and compares the version with its own before.
_FENCE = "UPDATE {lease} SET epoch = epoch + 1 WHERE partition >= 0"

#: The first subscription is made once: where somebody has dropped it, it does not come back.
_NEW = "NOT EXISTS (SELECT 1 FROM {meta}) AND NOT EXISTS (SELECT 1 FROM {subscription})"
#: In this order, because each statement checks that rows of the later ones are not there yet.
_ROWS = (
    f"""
    {{insert_once}} {{progress}} (subscription, generation, partition, epoch, n, base, settled_at)
    SELECT 'relay', 1, 0, 0, 0, '{EARLIEST}', {{now}} WHERE {_NEW} {{unless_there}}
    """,
    f"""
    {{insert_once}} {{lease}} (subscription, generation, partition)
    SELECT 'relay', 1, 0 WHERE {_NEW} {{unless_there}}
    """,
    f"""
    {{insert_once}} {{subscription}} (name, created_at) SELECT 'relay', {{now}} WHERE {_NEW} {{unless_there}}
    """,
    _CREATE,
    f"{_FENCE} AND EXISTS (SELECT 1 FROM {{meta}} WHERE version < {{version}})",
    "UPDATE {meta} SET version = {version} WHERE version < {version}",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The row of `outbox_meta`."""

    version: int
    slots: int
    system_identifier: str | None
    database_oid: int | None


def require_native(dialect: Dialect, message: str, read: Callable[[str], Any]) -> None:
    """Refuse a server that speaks as this kind of database does, and is another kind.

    `message`: the name of the log. `read` returns the value of a query.
    """
    foreign = dialect.home.why_foreign(read, message)
    if foreign is not None:
        raise DatabaseError("; ".join(foreign))


def stored_identity(channel: Channel) -> Identity | None:
    """Return the stored identity of the outbox; None when its row is missing."""
    with channel.database.explained():
        rows = channel.rows(_READ)
    return Identity(*rows[0]) if rows else None


def require_version(channel: Channel, stored: Identity) -> None:
    """Refuse tables of another version; the error says whether the tables or the library are too old."""
    if stored.version != VERSION:
        fix = f"run: {channel.database.upgrade_command}" if stored.version < VERSION else NEWER
        raise SchemaError(f"the tables are of version {stored.version}, this is {VERSION}; {fix}")


def first_row(channel: Channel, statement: str) -> Row:
    """Return the row that a statement reads from `outbox_meta`; raise `SchemaError` where nobody has written it."""
    rows = channel.rows(statement)
    if not rows:
        raise _is_empty(channel)
    return rows[0]


def _is_empty(channel: Channel) -> SchemaError:
    return SchemaError(f"outbox_meta is empty; run: {channel.database.upgrade_command}")


def verify(channel: Channel) -> None:
    """Refuse tables of another version or slot count, and a log whose ids another server drew."""
    stored = _stored(channel)
    require_version(channel, stored)
    _require_home(channel, stored)


def verify_for_writers(channel: Channel) -> None:
    """As `verify`, for a process that only writes: tables of a later version have all that its statements name."""
    stored = _stored(channel)
    if stored.version < VERSION:
        require_version(channel, stored)
    _require_home(channel, stored)


def _stored(channel: Channel) -> Identity:
    stored = stored_identity(channel)
    if stored is None:
        raise _is_empty(channel)
    return stored


def _require_home(channel: Channel, stored: Identity) -> None:
    if stored.slots != channel.database.slots:
        raise SchemaError(
            f"this outbox has {stored.slots} slots, not {channel.database.slots}; say Outbox(…, slots={stored.slots})"
        )
    if is_elsewhere(channel, stored):
        raise DatabaseError(
            "this database is a copy: its log was written on another server (or under another database oid), so stored"
            " positions mean nothing here and messages would be lost; with all workers stopped, run:"
            f" {channel.database.commands.line('restore')}"
        )


def is_copy(channel: Channel) -> bool:
    """Return whether another server drew the ids of the log, or the same server under another database oid."""
    stored = stored_identity(channel)
    return stored is not None and is_elsewhere(channel, stored)


def is_elsewhere(channel: Channel, stored: Identity) -> bool:
    """Return whether another server, or another database, is stored."""
    here = channel.rows(channel.database.dialect.home.identity)[0]
    return bool((stored.system_identifier, stored.database_oid) != here)


def adopt(channel: Channel) -> None:
    """Store that the log belongs to this server and database."""
    system, oid = channel.rows(channel.database.dialect.home.identity)[0]
    channel.run(_ADOPT, system=system, oid=oid)


def establish(channel: Channel) -> None:
    """Write the row, for tables that our migrations did not make; do nothing if the row is there."""
    channel.run(channel.database.sql(_CREATE, version=str(VERSION), slots=str(channel.database.slots)))


def fence(dialect: EngineDialect, tables: Tables) -> str:
    """Return the statement after which no worker settles anything before it has looked at the version again.

    The owners keep their leases until they notice, so that no worker sends beside a call that is under way.
    """
    return _FENCE.format(**_names(tables, dialect))


def seeded(tables: Tables) -> tuple[Table, ...]:
    """Return the tables that hold the first rows."""
    return tables.progress, tables.lease, tables.subscription, tables.meta


def first_rows(tables: Tables, dialect: EngineDialect, version: int, slots: int) -> list[str]:
    """Return the statements that write the first rows, and may be repeated; `dialect`: SQLAlchemy's."""
    ours = part_of(dialect.name, Dialect)
    parts = {
        "now": part_of(dialect.name, Native).now,
        "identity": ours.home.identity,
        "installation": ours.home.installation,
        "insert_once": ours.writes.insert_once,
        "unless_there": ours.writes.unless_there,
    }
    return [
        statement.format(**_names(tables, dialect), **parts, version=version, slots=int(slots)) for statement in _ROWS
    ]


def _names(tables: Tables, dialect: EngineDialect) -> dict[str, str]:
    """Return the tables of the first rows as SQL names them."""
    named = dialect.identifier_preparer.format_table
    return {table.name.removeprefix(PREFIX): named(table) for table in seeded(tables)}
