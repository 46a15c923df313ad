"""Topics, consumer groups and clients of the fronts of RocketMQ's protocol, which all fronts of an outbox share.

The tables are new, and nobody but fronts and the commands of operators uses them. So the version of the tables stays.

All of the version before goes on beside it: writers, relays, consumers, extracts and commands.
"""

import sqlalchemy as sa
from alembic import op

from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native

revision = "0009"
down_revision = "0008"
version = 6

_TABLES = ("topic", "group", "client")


def upgrade() -> None:
    native, schema = part_of(op.get_context().dialect.name, Native), _schema()
    op.create_table(
        "outbox_topic",
        sa.Column("name", native.name(), primary_key=True),
        sa.Column("type", sa.Text, nullable=False, comment="NORMAL, FIFO, DELAY or TRANSACTION"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        comment="topics of fronts; shrinks by hand",
        schema=schema,
    )
    op.create_table(
        "outbox_group",
        sa.Column("name", native.name(), primary_key=True),
        sa.Column("ordered", sa.Boolean, nullable=False, comment="takes the messages of a key in order"),
        sa.Column("attempts", sa.Integer, nullable=False, comment="the most for a message"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        comment="consumer groups of fronts; shrinks by hand",
        schema=schema,
    )
    op.create_table(
        "outbox_client",
        sa.Column("id", native.name(), primary_key=True),
        sa.Column("kind", sa.Text, nullable=False, comment="in the words of the protocol"),
        sa.Column("topics", sa.Text, nullable=False, comment="JSON list"),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        comment="clients of fronts; shrinks by fronts",
        schema=schema,
    )


def downgrade() -> None:
    for name in _TABLES:
        op.drop_table(f"outbox_{name}", schema=_schema())


def _schema() -> str | None:
    found: str | None = op.get_context().opts["version_table_schema"]
    return found
