"""The first checks on a connection that will read or write an outbox for long."""

from __future__ import annotations

from collections.abc import Callable

from outbox.errors import SchemaError
from outbox.store import identity
from outbox.store.database import Channel
from outbox.store.dialects.statements import Sql
from outbox.store.log.log import Log


def ensure_outbox(channel: Channel, *, verify: Callable[[Channel], None] = identity.verify) -> None:
    """Make sure that the tables are there, have this version, and were written on this server.

    `verify`: whether the version is one that the caller can use.

    Raises:
        StandbyError: the server is a standby.
        SchemaError: the tables are missing, or of another version.
        DatabaseError: the database is a copy, or spreads over several servers.
    """
    database = channel.database
    identity.require_native(database.dialect, database.names["message"], lambda query: channel.rows(Sql(query))[0][0])
    with channel.database.explained():
        # First of all, because a standby would answer a write with an error that looks like an outage.
        Log().now(channel)
        # A write only where the row is missing: a process with the right to read the table is enough elsewhere.
        if identity.stored_identity(channel) is None:
            identity.establish(channel)
    verify(channel)


def of_other_tables(channel: Channel, error: Exception) -> Exception:
    """Return the error that names the version, where a statement failed at tables of another one; else `error`."""
    errors = channel.database.dialect.errors
    if errors.missing_table(error) or errors.missing_column(error):
        try:
            identity.verify(channel)
        except Exception as told:
            return told if isinstance(told, SchemaError) else error
    return error
