"""What writers and consumers keep for themselves: acks of direct sends, dedup keys, the inbox; and a reader's grace."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    schema: str | None = op.get_context().opts["version_table_schema"]
    grace = sa.Column(
        "grace_ms", sa.Integer, nullable=False, server_default=sa.text("0"), comment="reads so long after the commit"
    )
    op.add_column("outbox_subscription", grace, schema=schema)
    heads = sa.text("blocks AND state <> 'blocked'")
    columns = ["subscription", "key", "place"]
    op.create_index(
        "outbox_parked_head", "outbox_parked", columns, schema=schema, postgresql_where=heads, sqlite_where=heads
    )
    create_ack(schema, op.get_context().dialect.name)
    create_dedup(schema)
    create_inbox(schema)
    meta = sa.table("outbox_meta", sa.column("version", sa.Integer), schema=schema)
    op.execute(sa.update(meta).values(version=2))


def create_ack(schema: str | None, dialect: str) -> None:
    xact_id = sa.text("(pg_current_xact_id()::text::bigint)")
    settled = [sa.Column("xact_id", sa.BigInteger, nullable=False, server_default=xact_id)]
    op.create_table(
        "outbox_ack",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), sa.Identity(cache=1), primary_key=True),
        sa.Column("subscription", name(), nullable=False),
        sa.Column("writer", sa.Text, nullable=False, comment="the process that sent them"),
        sa.Column("first_id", sa.BigInteger, nullable=False),
        sa.Column("last_id", sa.BigInteger, nullable=False),
        sa.Column("ids", sa.Text, nullable=False, comment="JSON list of places in the log"),
        sa.Column("acked_at", moment(), nullable=False),
        *(settled if dialect == "postgresql" else []),
        schema=schema,
        comment="batches that their writer sent; shrinks by the lease holder of the compensation",
    )
    op.create_index("outbox_ack_last_id", "outbox_ack", ["subscription", "last_id"], schema=schema)


def create_dedup(schema: str | None) -> None:
    op.create_table(
        "outbox_dedup",
        sa.Column("dedup_key", name(), primary_key=True),
        sa.Column("message_id", sa.Uuid, nullable=False),
        sa.Column("expires_at", moment(), nullable=False),
        schema=schema,
        comment="dedup keys of writers; shrinks by lease holders",
    )
    op.create_index("outbox_dedup_expires_at", "outbox_dedup", ["expires_at"], schema=schema)


def create_inbox(schema: str | None) -> None:
    op.create_table(
        "outbox_inbox",
        sa.Column("consumer", name(), primary_key=True),
        sa.Column("message_id", sa.Uuid, primary_key=True),
        sa.Column("handled_at", moment(), nullable=False),
        sa.Column("expires_at", moment(), nullable=False),
        schema=schema,
        comment="what consumers have handled; shrinks by lease holders",
    )
    op.create_index("outbox_inbox_expires_at", "outbox_inbox", ["expires_at"], schema=schema)


def name() -> sa.types.TypeEngine[str]:
    """Text that compares by bytes, whatever the database's locale."""
    return sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def moment() -> sa.DateTime:
    return sa.DateTime(timezone=True)
