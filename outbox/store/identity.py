"""The identity of an outbox: one row with its version, its slots, and the server that drew the ids of its log."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.errors import DatabaseError, SchemaError
from outbox.schema import VERSION
from outbox.store.database import Channel

_READ = "SELECT version, slots, system_identifier, database_oid FROM {meta}"
_CREATE = """
    INSERT INTO {meta} (one, version, slots, system_identifier, database_oid, purged_id, installation)
    SELECT 1, :version, :slots, i.system_identifier, i.database_oid, 0, {installation} FROM ({identity}) AS i
    WHERE NOT EXISTS (SELECT 1 FROM {meta})
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """The row of `outbox_meta`."""

    version: int
    slots: int
    system_identifier: str | None
    database_oid: int | None


def verify(channel: Channel) -> None:
    """Refuse tables of another version or slot count, and a log whose ids another server drew."""
    rows = channel.rows(_READ)
    if not rows:
        raise SchemaError(f"outbox_meta is empty; run: {channel.database.upgrade_command}")
    stored = Identity(*rows[0])
    if stored.version != VERSION:
        raise SchemaError(
            f"the tables are of version {stored.version}, this is {VERSION}; run: {channel.database.upgrade_command}"
        )
    if stored.slots != channel.database.slots:
        raise SchemaError(
            f"this outbox has {stored.slots} slots, not {channel.database.slots}; say Outbox(…, slots={stored.slots})"
        )
    if _elsewhere(channel, stored):
        raise DatabaseError(
            "this database is a copy: its log was written on another server (or under another database oid), so stored"
            " positions mean nothing here and messages would be lost; run `outbox restore` with all workers stopped"
        )


def is_copy(channel: Channel) -> bool:
    """Return whether another server drew the ids of the log, or this one under another database oid."""
    rows = channel.rows(_READ)
    return bool(rows) and _elsewhere(channel, Identity(*rows[0]))


def _elsewhere(channel: Channel, stored: Identity) -> bool:
    here = channel.rows(channel.database.dialect.identity)[0]
    return bool((stored.system_identifier, stored.database_oid) != here)


def establish(channel: Channel) -> None:
    """Write the row, for tables that were not made by our migrations; do nothing when it is there."""
    channel.run(_CREATE, version=VERSION, slots=channel.database.slots)
