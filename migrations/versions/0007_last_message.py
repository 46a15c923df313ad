"""The last message that a progress has passed, which tells whether ids of the log were given out again since."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    schema: str | None = op.get_context().opts["version_table_schema"]
    last = sa.Column("last_message", sa.Uuid, comment="the last message that was passed, where positions are ids")
    op.add_column("outbox_progress", last, schema=schema)
    meta = sa.table("outbox_meta", sa.column("version", sa.Integer), schema=schema)
    op.execute(sa.update(meta).values(version=7))
