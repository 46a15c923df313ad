"""What a lease says of its holder, and what a worker that cannot work says of itself."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    schema: str | None = op.get_context().opts["version_table_schema"]
    columns: list[sa.Column[object]] = [
        sa.Column("length_ms", sa.BigInteger, comment="for how long its holder takes it each time"),
        sa.Column("notice", sa.Text, comment="why a worker does not work, as it says itself"),
        sa.Column("noticed_at", sa.DateTime(timezone=True)),
    ]
    for column in columns:
        op.add_column("outbox_lease", column, schema=schema)
    meta = sa.table("outbox_meta", sa.column("version", sa.Integer), schema=schema)
    op.execute(sa.update(meta).values(version=3))
