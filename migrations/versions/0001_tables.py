"""The tables of an outbox. The rows that they begin with are written by `outbox.migrate`.

There is no way back: messages that were not sent yet are not a tool's to drop.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from outbox.store.dialects import part_of
from outbox.store.dialects.kinds import KINDS
from outbox.store.dialects.native import Native

revision = "0001"
down_revision = None
version = 1


def upgrade() -> None:
    native = part_of(op.get_context().dialect.name, Native)
    create_message(native)
    create_subscription()
    create_lease()
    create_progress()
    create_parked(native)
    create_ack(native)
    create_dedup()
    create_inbox()
    create_op()
    create_worker()
    create_meta()


def downgrade() -> None:
    raise NotImplementedError("the first tables are dropped by hand: messages that were not sent are in them")


def create_message(native: Native) -> None:
    table(
        "outbox_message",
        native.id(),
        *envelope(),
        sa.Column("created_at", moment(), nullable=False, server_default=sa.text(native.now)),
        sa.Column("deliver_at", moment()),
        sa.Column("expires_at", moment()),
        sa.Column("direct", name(), comment="subscription whose writer sends the message itself"),
        *settled(native),
        body(),
        sqlite_autoincrement=True,
        comment="append-only log; shrinks by purge",
    )
    if native.transaction is not None:
        index("outbox_message_xact_id", "outbox_message", "xact_id", "id")
    index("outbox_message_half", "outbox_message", "key", **native.partial("topic = 'RMQ_SYS_TRANS_HALF_TOPIC'"))


def create_subscription() -> None:
    kinds = "relay, compensation, check, extract, consumer, broadcast or backfill"
    table(
        "outbox_subscription",
        sa.Column("name", name(), primary_key=True),
        sa.Column("topics", sa.Text, comment="JSON list; null: all"),
        sa.Column("destination", sa.Text, comment="without credentials; null: not declared yet"),
        sa.Column("on_dead", sa.Text, comment="block or continue; null: not declared yet"),
        sa.Column("partitions", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("generation", sa.Integer, nullable=False, server_default=sa.text("1")),
        sa.Column("created_at", moment(), nullable=False),
        sa.Column(
            "grace_ms",
            sa.Integer,
            nullable=False,
            server_default=sa.text("0"),
            comment="reads so long after the commit",
        ),
        sa.Column("kind", sa.Text, nullable=False, server_default=sa.text("'relay'"), comment=kinds),
        sa.Column("tags", sa.Text, comment="JSON list; null: all"),
        sa.Column("filter", sa.Text, comment="condition in SQL92; null: none"),
        sa.Column("hold_ms", sa.BigInteger, comment="of an extract: holds rows back so long after its last progress"),
        sa.Column("stop_at", sa.Text, comment="where all partitions meet before their number changes, or end"),
        sa.Column("next_partitions", sa.Integer, comment="their number after that"),
        sa.Column("ordered", sa.Boolean, nullable=False, server_default=sa.text("true"), comment="keeps keys in order"),
        sa.Column("compact", sa.Boolean, nullable=False, server_default=sa.text("false"), comment="newest of a key"),
        sa.Column("pauses", sa.Text, comment="JSON list of what people have paused; null: nothing"),
        comment="readers of the log; shrinks by hand",
    )


def create_lease() -> None:
    table(
        "outbox_lease",
        *partition_key(),
        sa.Column("owner", sa.Text),
        sa.Column("epoch", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("renewals", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("lease_until", moment()),
        sa.Column("length_ms", sa.BigInteger, comment="for how long the holder takes the lease each time"),
        sa.Column("notice", sa.Text, comment="why a worker does not work, as it says itself"),
        sa.Column("noticed_at", moment()),
        comment="a row per partition; shrinks with the subscription",
    )


def create_progress() -> None:
    table(
        "outbox_progress",
        *partition_key(),
        sa.Column("epoch", sa.BigInteger, primary_key=True),
        sa.Column("n", sa.BigInteger, primary_key=True),
        sa.Column("base", sa.Text, nullable=False),
        sa.Column("target", sa.Text),
        sa.Column("after_id", sa.BigInteger),
        sa.Column("settled_at", moment(), nullable=False),
        sa.Column("last_message", sa.Uuid, comment="the last message that was passed, where positions are ids"),
        comment="the newest row counts; older rows are deleted by the lease holder",
    )


def create_parked(native: Native) -> None:
    table(
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
        comment="copies of parked messages; shrinks by the lease holder",
    )
    index(
        "outbox_parked_due",
        "outbox_parked",
        "subscription",
        "due_at",
        **native.partial("state IN ('delayed', 'waiting', 'retry')"),
    )
    index("outbox_parked_ready", "outbox_parked", "subscription", "place", **native.partial("state = 'blocked'"))
    index("outbox_parked_key", "outbox_parked", "subscription", "key", "place", **native.partial("blocks"))
    index(
        "outbox_parked_head",
        "outbox_parked",
        "subscription",
        "key",
        "place",
        **native.partial("blocks AND state <> 'blocked'"),
    )
    index("outbox_parked_state", "outbox_parked", "subscription", "state", "id")
    index("outbox_parked_request", "outbox_parked", "subscription", **native.partial("request IS NOT NULL"))


def create_ack(native: Native) -> None:
    table(
        "outbox_ack",
        native.id(),
        sa.Column("subscription", name(), nullable=False),
        sa.Column("writer", sa.Text, nullable=False, comment="the process that sent them"),
        sa.Column("first_id", sa.BigInteger, nullable=False),
        sa.Column("last_id", sa.BigInteger, nullable=False),
        sa.Column("ids", sa.Text, nullable=False, comment="JSON list of places in the log"),
        sa.Column("acked_at", moment(), nullable=False),
        *settled(native),
        comment="batches sent by the writer; shrinks by the lease holder of the compensation",
    )
    index("outbox_ack_last_id", "outbox_ack", "subscription", "last_id")


def create_dedup() -> None:
    table(
        "outbox_dedup",
        sa.Column("dedup_key", name(), primary_key=True),
        sa.Column("message_id", sa.Uuid, nullable=False),
        sa.Column("expires_at", moment(), nullable=False),
        comment="dedup keys of writers; shrinks by lease holders",
    )
    index("outbox_dedup_expires_at", "outbox_dedup", "expires_at")


def create_inbox() -> None:
    table(
        "outbox_inbox",
        sa.Column("consumer", name(), primary_key=True),
        sa.Column("message_id", sa.Uuid, primary_key=True),
        sa.Column("handled_at", moment(), nullable=False),
        sa.Column("expires_at", moment(), nullable=False),
        comment="what consumers have handled; shrinks by lease holders",
    )
    index("outbox_inbox_expires_at", "outbox_inbox", "expires_at")


def create_op() -> None:
    table(
        "outbox_op",
        sa.Column("transaction_id", name(), primary_key=True),
        sa.Column("op", sa.Text, nullable=False),
        sa.Column("decided_by", sa.Text, nullable=False),
        sa.Column("decided_at", moment(), nullable=False),
        sa.CheckConstraint("op IN ('commit', 'rollback')", name="outbox_op_op"),
        comment="verdicts on transactions; shrinks by purge, after their half messages",
    )


def create_worker() -> None:
    table(
        "outbox_worker",
        sa.Column("subscription", name(), primary_key=True),
        sa.Column("id", sa.Text, primary_key=True, comment="as in outbox_lease.owner"),
        sa.Column("seen_at", moment(), nullable=False),
        comment="workers of subscriptions with several partitions; shrinks by lease holders",
    )


def create_meta() -> None:
    table(
        "outbox_meta",
        sa.Column("one", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("system_identifier", sa.Text, comment="of the server that draws the ids; null where it has none"),
        sa.Column("database_oid", sa.BigInteger),
        sa.Column("purged", sa.Text, comment="position below which rows may be gone"),
        sa.Column("purged_id", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("purged_at", moment(), comment="end of the last purge"),
        sa.Column("keep_ms", sa.BigInteger, comment="messages older than this went with the last purge"),
        sa.Column("installation", sa.Text, comment="random id of the outbox, drawn with the tables"),
        sa.CheckConstraint("one = 1", name="outbox_meta_one"),
        comment="a single row, written by migrations, CLI and purge",
    )


def table(name: str, *columns: sa.schema.SchemaItem, **options: Any) -> None:
    op.create_table(name, *columns, schema=op.get_context().opts["version_table_schema"], **options)


def index(name: str, table: str, *columns: str, **options: Any) -> None:
    op.create_index(name, table, list(columns), schema=op.get_context().opts["version_table_schema"], **options)


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


def partition_key() -> list[sa.Column[Any]]:
    return [
        sa.Column("subscription", name(), primary_key=True),
        sa.Column("generation", sa.Integer, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True),
    ]


def settled(native: Native) -> list[sa.Column[Any]]:
    number = native.transaction
    return (
        [] if number is None else [sa.Column("xact_id", sa.BigInteger, nullable=False, server_default=sa.text(number))]
    )


def body() -> sa.Column[Any]:
    return sa.Column("body", sa.LargeBinary, nullable=False)


def name() -> sa.types.TypeEngine[str]:
    """Text that compares by bytes, whatever the database's locale."""
    found: sa.types.TypeEngine[str] = sa.Text()
    for kind in KINDS:
        found = found.with_variant(part_of(kind, Native).name(), kind)
    return found


def moment() -> sa.DateTime:
    return sa.DateTime(timezone=True)
