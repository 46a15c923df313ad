"""How long a reader outside of the database, as an extract to an archive is one, holds retention back."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    schema: str | None = op.get_context().opts["version_table_schema"]
    hold = sa.Column("hold_ms", sa.BigInteger, comment="of an extract: holds rows back so long after its last progress")
    op.add_column("outbox_subscription", hold, schema=schema)
    if op.get_context().dialect.name == "postgresql":
        op.alter_column(
            "outbox_subscription",
            "kind",
            existing_type=sa.Text,
            existing_nullable=False,
            existing_server_default=sa.text("'relay'"),
            existing_comment="relay, compensation or check",
            comment="relay, compensation, check or extract",
            schema=schema,
        )
    meta = sa.table("outbox_meta", sa.column("version", sa.Integer), schema=schema)
    op.execute(sa.update(meta).values(version=5))
