"""The first rows of an outbox, for tables that were made without our migrations."""

from __future__ import annotations

from sqlalchemy import Table
from sqlalchemy.engine import Dialect

from outbox.model.position import EARLIEST
from outbox.schema import PREFIX, VERSION, Tables, now_default
from outbox.store.database import dialect_of

#: The first subscription is made once: where somebody has dropped it, it does not come back.
_NEW = "NOT EXISTS (SELECT 1 FROM {meta}) AND NOT EXISTS (SELECT 1 FROM {subscription})"

#: In this order, because each statement checks that rows of the later ones are not there yet. The tables of every
#: version have these columns.
_ROWS = (
    f"""
    INSERT INTO {{progress}} (subscription, generation, partition, epoch, n, base, settled_at)
    SELECT 'relay', 1, 0, 0, 0, '{EARLIEST}', {{now}} WHERE {_NEW} ON CONFLICT DO NOTHING
    """,
    f"""
    INSERT INTO {{lease}} (subscription, generation, partition)
    SELECT 'relay', 1, 0 WHERE {_NEW} ON CONFLICT DO NOTHING
    """,
    f"""
    INSERT INTO {{subscription}} (name, created_at)
    SELECT 'relay', {{now}} WHERE {_NEW} ON CONFLICT DO NOTHING
    """,
    """
    INSERT INTO {meta} (one, version, slots, system_identifier, database_oid)
    SELECT 1, {version}, {slots}, i.system_identifier, i.database_oid FROM ({identity}) AS i
    WHERE true ON CONFLICT DO NOTHING
    """,
    "UPDATE {meta} SET version = {version} WHERE version < {version}",
)
#: Only for tables of the newest version, because older ones do not have the column.
_INSTALLATION = "UPDATE {meta} SET installation = {installation} WHERE installation IS NULL"


def written(tables: Tables) -> tuple[Table, ...]:
    """Return the tables that hold these first rows."""
    return tables.progress, tables.lease, tables.subscription, tables.meta


def rows(tables: Tables, dialect: Dialect, version: int, slots: int) -> list[str]:
    """Return the statements that write the rows, without parameters, for use in a script. They may be repeated."""
    names = {
        table.name.removeprefix(PREFIX): dialect.identifier_preparer.format_table(table) for table in written(tables)
    }
    ours = dialect_of(dialect.name)
    parts = {"now": now_default(dialect.name), "identity": ours.identity, "installation": ours.installation}
    statements = (*_ROWS, _INSTALLATION) if version == VERSION else _ROWS
    return [statement.format(**names, **parts, version=version, slots=int(slots)) for statement in statements]
