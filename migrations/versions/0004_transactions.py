"""RocketMQ's transactions: the verdict on each, where its half messages are found, and who checks back on them."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    schema: str | None = op.get_context().opts["version_table_schema"]
    kind = sa.Column(
        "kind", sa.Text, nullable=False, server_default=sa.text("'relay'"), comment="relay, compensation or check"
    )
    op.add_column("outbox_subscription", kind, schema=schema)
    op.add_column("outbox_subscription", sa.Column("tags", sa.Text, comment="JSON list; null: all"), schema=schema)
    subscription = sa.table(
        "outbox_subscription", sa.column("name", sa.Text), sa.column("kind", sa.Text), schema=schema
    )
    compensations = subscription.c.name.like("%:compensation")
    op.execute(sa.update(subscription).where(compensations).values(kind="compensation"))
    halves = sa.text("topic = 'RMQ_SYS_TRANS_HALF_TOPIC'")
    op.create_index(
        "outbox_message_half", "outbox_message", ["key"], schema=schema, postgresql_where=halves, sqlite_where=halves
    )
    op.create_table(
        "outbox_op",
        sa.Column("transaction_id", sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), primary_key=True),
        sa.Column("op", sa.Text, nullable=False),
        sa.Column("decided_by", sa.Text, nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("op IN ('commit', 'rollback')", name="outbox_op_op"),
        schema=schema,
        comment="verdicts on transactions; shrinks by purge, after their half messages",
    )
    meta = sa.table("outbox_meta", sa.column("version", sa.Integer), schema=schema)
    op.execute(sa.update(meta).values(version=4))
