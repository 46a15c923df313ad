"""The highest id of the log at each settle, by which a restored copy tells what was written on it.

Rows from before have none: after a restore their subscriptions read the log again.

The version before goes on beside it, and its settles store no highest id.
"""

import sqlalchemy as sa
from alembic import op

from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native

revision = "0002"
down_revision = "0001"
version = 1


def upgrade() -> None:
    if part_of(op.get_context().dialect.name, Native).transaction is None:
        return
    comment = "no message with a higher id was passed"
    op.add_column("outbox_progress", sa.Column("highest_id", sa.BigInteger, comment=comment), schema=schema())


def downgrade() -> None:
    if part_of(op.get_context().dialect.name, Native).transaction is not None:
        op.drop_column("outbox_progress", "highest_id", schema=schema())


def schema() -> str | None:
    found: str | None = op.get_context().opts["version_table_schema"]
    return found
