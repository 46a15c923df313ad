"""Since when a message is a dead letter; since when a worker has a partition, its version and its attempts.

What is dead already counts from the upgrade on, so that no retention of dead letters ends too early. The new columns
are the last of their tables, so that SQLite adds them in place.

Writers of the version before go on beside it. Its relays, consumers, extracts and commands stop with an error that
names the version, because a dead letter without a moment would never be too old.
"""

import sqlalchemy as sa
from alembic import op

from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native

revision = "0008"
down_revision = "0007"
version = 6

_DEAD_AT = "since when the message is a dead letter; null: it is none"
_VERSION = "of the holder's library"
_SINCE = "when the holder took the partition"
_ATTEMPTS = "so many failures of a message its holder allows"
_KEEP_DEAD = "dead letters older than this went with the last purge; null: all were kept"


def upgrade() -> None:
    native, schema = part_of(op.get_context().dialect.name, Native), _schema()
    op.add_column("outbox_parked", sa.Column("dead_at", _moment(), comment=_DEAD_AT), schema=schema)
    parked = op.get_context().dialect.identifier_preparer.format_table(sa.table("outbox_parked", schema=schema))
    op.execute(f"UPDATE {parked} SET dead_at = {native.now} WHERE state = 'dead'")  # noqa: S608 - the name is quoted
    of_dead = native.partial("dead_at IS NOT NULL")
    columns = ("subscription", "dead_at", "id")
    op.create_index("outbox_parked_dead", "outbox_parked", columns, schema=schema, **of_dead)
    op.add_column("outbox_lease", sa.Column("version", sa.Text, comment=_VERSION), schema=schema)
    op.add_column("outbox_lease", sa.Column("since", _moment(), comment=_SINCE), schema=schema)
    op.add_column("outbox_lease", sa.Column("attempts", sa.Integer, comment=_ATTEMPTS), schema=schema)
    op.add_column("outbox_meta", sa.Column("keep_dead_ms", sa.BigInteger, comment=_KEEP_DEAD), schema=schema)


def downgrade() -> None:
    op.drop_index("outbox_parked_dead", "outbox_parked", schema=_schema())
    for table, column in (
        ("outbox_parked", "dead_at"),
        ("outbox_lease", "version"),
        ("outbox_lease", "since"),
        ("outbox_lease", "attempts"),
        ("outbox_meta", "keep_dead_ms"),
    ):
        op.drop_column(table, column, schema=_schema())


def _moment() -> sa.DateTime:
    return sa.DateTime(timezone=True)


def _schema() -> str | None:
    found: str | None = op.get_context().opts["version_table_schema"]
    return found
