"""The log, its subscriptions, their leases, progress and parked messages, and the one row about them all.

There is no way back: messages that were not sent yet are not a tool's to drop.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    options = op.get_context().opts
    dialect = op.get_context().dialect.name
    schema: str | None = options["version_table_schema"]
    create_message(schema, dialect)
    create_parked(schema)
    create_relay(create_subscription(schema), create_lease(schema), create_progress(schema), dialect)
    meta = create_meta(schema)
    op.execute(sa.insert(meta).values(one=1, version=1, slots=sa.literal(options["slots"]), **identity(dialect)))


def create_message(schema: str | None, dialect: str) -> None:
    op.create_table(
        "outbox_message",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), sa.Identity(cache=1), primary_key=True),
        *envelope(),
        sa.Column("created_at", moment(), nullable=False, server_default=now(dialect)),
        sa.Column("deliver_at", moment()),
        sa.Column("expires_at", moment()),
        sa.Column("direct", name(), comment="subscription whose writer sends the message itself"),
        *([settled()] if dialect == "postgresql" else []),
        body(),
        schema=schema,
        sqlite_autoincrement=True,
        comment="append-only log; shrinks by purge",
    )
    if dialect == "postgresql":
        op.create_index("outbox_message_xact_id", "outbox_message", ["xact_id", "id"], schema=schema)


def create_subscription(schema: str | None) -> sa.Table:
    return op.create_table(
        "outbox_subscription",
        sa.Column("name", name(), primary_key=True),
        sa.Column("topics", sa.Text, comment="JSON list; null: all"),
        sa.Column("destination", sa.Text, comment="without credentials; null: not declared yet"),
        sa.Column("on_dead", sa.Text, comment="block or continue; null: not declared yet"),
        sa.Column("partitions", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("generation", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("created_at", moment(), nullable=False),
        schema=schema,
        comment="readers of the log; shrinks by hand",
    )


def create_relay(subscription: sa.Table, lease: sa.Table, progress: sa.Table, dialect: str) -> None:
    """The first reader, before the first message: it holds retention back from the beginning."""
    partition = {"subscription": "relay", "generation": 1, "partition": 0}
    start = {"epoch": 0, "n": 0, "base": "0:0:", "settled_at": now(dialect)}
    op.execute(sa.insert(subscription).values(name="relay", created_at=now(dialect)))
    op.execute(sa.insert(lease).values(**partition))
    op.execute(sa.insert(progress).values(**partition, **start))


def create_lease(schema: str | None) -> sa.Table:
    return op.create_table(
        "outbox_lease",
        *partition_key(),
        sa.Column("owner", sa.Text),
        sa.Column("epoch", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("renewals", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("lease_until", moment()),
        schema=schema,
        comment="one row a partition; shrinks with its subscription",
    )


def create_progress(schema: str | None) -> sa.Table:
    return op.create_table(
        "outbox_progress",
        *partition_key(),
        sa.Column("epoch", sa.BigInteger, primary_key=True),
        sa.Column("n", sa.BigInteger, primary_key=True),
        sa.Column("base", sa.Text, nullable=False),
        sa.Column("target", sa.Text),
        sa.Column("after_id", sa.BigInteger),
        sa.Column("settled_at", moment(), nullable=False),
        schema=schema,
        comment="the newest row counts; older ones are deleted by the lease holder",
    )


def create_parked(schema: str | None) -> None:
    op.create_table(
        "outbox_parked",
        sa.Column("subscription", name(), primary_key=True),
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        *envelope(),
        sa.Column("created_at", moment(), nullable=False),
        sa.Column("deliver_at", moment()),
        sa.Column("expires_at", moment()),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("blocks", sa.Boolean, nullable=False, comment="later messages of the key wait for this one"),
        sa.Column("place", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_at", moment()),
        sa.Column("error", sa.Text),
        sa.Column("parked_at", moment(), nullable=False),
        sa.Column("request", sa.Text),
        sa.Column("requested_by", sa.Text),
        sa.Column("request_reason", sa.Text),
        sa.Column("requested_at", moment()),
        body(),
        sa.CheckConstraint("state IN ('delayed', 'waiting', 'retry', 'blocked', 'dead')", name="outbox_parked_state"),
        schema=schema,
        comment="copies of parked messages; shrinks by its lease holder",
    )
    index_parked(schema, "due", ["due_at"], "state IN ('delayed', 'waiting', 'retry')")
    index_parked(schema, "ready", ["place"], "state = 'blocked'")
    index_parked(schema, "key", ["key", "place"], "blocks")
    index_parked(schema, "state", ["state", "id"])
    index_parked(schema, "request", [], "request IS NOT NULL")


def index_parked(schema: str | None, suffix: str, columns: list[str], where: str | None = None) -> None:
    predicate: dict[str, Any] = {}
    if where is not None:
        predicate = {"postgresql_where": sa.text(where), "sqlite_where": sa.text(where)}
    op.create_index(f"outbox_parked_{suffix}", "outbox_parked", ["subscription", *columns], schema=schema, **predicate)


def create_meta(schema: str | None) -> sa.Table:
    return op.create_table(
        "outbox_meta",
        sa.Column("one", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("system_identifier", sa.Text, comment="of the server that draws the ids; null where it has none"),
        sa.Column("database_oid", sa.BigInteger),
        sa.Column("purged", sa.Text, comment="position below which rows may be gone"),
        sa.Column("purged_id", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.CheckConstraint("one = 1", name="outbox_meta_one"),
        schema=schema,
        comment="one row, written by migrations, CLI and purge",
    )


def envelope() -> list[sa.Column[Any]]:
    return [
        sa.Column("message_id", sa.Uuid, nullable=False),
        sa.Column("topic", name(), nullable=False),
        sa.Column("key", name()),
        sa.Column("slot", sa.SmallInteger, nullable=False),
        sa.Column("tags", name()),
        sa.Column("headers", sa.Text, comment="JSON object of strings"),
        sa.Column("content_type", sa.Text),
    ]


def body() -> sa.Column[Any]:
    return sa.Column("body", sa.LargeBinary, nullable=False)


def partition_key() -> list[sa.Column[Any]]:
    return [
        sa.Column("subscription", name(), primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True),
    ]


def settled() -> sa.Column[Any]:
    return sa.Column(
        "xact_id", sa.BigInteger, nullable=False, server_default=sa.text("(pg_current_xact_id()::text::bigint)")
    )


def identity(dialect: str) -> dict[str, Any]:
    """Whose ids these are: a copy of the database elsewhere is told apart by it."""
    if dialect != "postgresql":
        return {}
    return {
        "system_identifier": sa.text("(SELECT system_identifier::text FROM pg_control_system())"),
        "database_oid": sa.text("(SELECT oid::bigint FROM pg_database WHERE datname = current_database())"),
    }


def name() -> sa.types.TypeEngine[str]:
    """Text that compares by bytes, whatever the database's locale."""
    return sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def moment() -> sa.DateTime:
    return sa.DateTime(timezone=True)


def now(dialect: str) -> sa.TextClause:
    return sa.text("statement_timestamp()" if dialect == "postgresql" else "(strftime('%Y-%m-%d %H:%M:%f', 'now'))")
