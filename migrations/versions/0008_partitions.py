"""Several partitions a subscription: who is alive to share them, and where they meet before their number changes."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    schema: str | None = op.get_context().opts["version_table_schema"]
    name = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "outbox_worker",
        sa.Column("subscription", name, primary_key=True),
        sa.Column("id", sa.Text, primary_key=True, comment="as in outbox_lease.owner"),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        comment="workers of subscriptions with several partitions; shrinks by lease holders",
        schema=schema,
    )
    for column in (
        sa.Column("stop_at", sa.Text, comment="position at which all partitions meet before their number changes"),
        sa.Column("next_partitions", sa.Integer, comment="their number after that"),
    ):
        op.add_column("outbox_subscription", column, schema=schema)
    meta = sa.table("outbox_meta", sa.column("version", sa.Integer), schema=schema)
    op.execute(sa.update(meta).values(version=8))
